#!/usr/bin/env bash
# Prints packer/versions.auto.pkrvars.hcl with the newest versions: of the driver the newest of the branch that the file names, because a
# branch is a decision (Ubuntu's packages, support until when). FILE is the file as it is.
#
#     workflows/newest-versions.sh packer/versions.auto.pkrvars.hcl >newest.pkrvars.hcl
#
# GITHUB_API_URL and NVIDIA_RELEASES_URL name other places; GITHUB_TOKEN, where it is set, raises GitHub's rate limit.
set -euo pipefail

file=${1:?usage: newest-versions.sh FILE}
github=${GITHUB_API_URL:-https://api.github.com}
# NVIDIA offers this file to programs: https://docs.nvidia.com/datacenter/tesla/drivers/supported-drivers-and-cuda-toolkit-versions.html
releases=${NVIDIA_RELEASES_URL:-https://docs.nvidia.com/datacenter/tesla/drivers/releases.json}

stop() {
  echo "error: $1" >&2
  exit 1
}

get() {
  local headers=()
  if [ "$1" != "$releases" ] && [ -n "${GITHUB_TOKEN:-}" ]; then
    headers=(--header "Authorization: Bearer $GITHUB_TOKEN")
  fi
  curl --silent --show-error --fail --location --retry 3 --max-time 60 "${headers[@]}" "$1" || stop "$1 could not be read"
}

# The answer must look like a version before it becomes part of a file that Packer reads.
version() {
  [[ "$2" =~ ^[0-9]+(\.[0-9]+){1,2}$ ]] || stop "$1 has no version, found '$2'"
  echo "$2"
}

value() {
  sed --quiet "s/^$1 *= \"\(.*\)\"\$/\1/p" "$file"
}

old=$(version "nvidia_driver_version in $file" "$(value nvidia_driver_version)")
branch=${old%%.*}
driver=$(get "$releases" | jq --raw-output --arg branch "$branch" \
  '[.[$branch].driver_info[]?.release_version] | max_by(split(".") | map(tonumber)) // empty')
driver=$(version "branch $branch in $releases" "$driver")

toolkit=$(get "$github/repos/NVIDIA/nvidia-container-toolkit/releases/latest" | jq --raw-output '.tag_name // "" | ltrimstr("v")')
toolkit=$(version "the newest release of NVIDIA/nvidia-container-toolkit" "$toolkit")

runner_release=$(get "$github/repos/actions/runner/releases/latest")
runner=$(jq --raw-output '.tag_name // "" | ltrimstr("v")' <<<"$runner_release")
runner=$(version "the newest release of actions/runner" "$runner")
archive=actions-runner-linux-x64-$runner.tar.gz
sha256=$(jq --raw-output --arg archive "$archive" \
  '.assets[]? | select(.name == $archive) | .digest // "" | ltrimstr("sha256:")' <<<"$runner_release")
[[ "$sha256" =~ ^[0-9a-f]{64}$ ]] || stop "the release of actions/runner $runner names no checksum of $archive, found '$sha256'"

sed --expression "s/^\(nvidia_driver_version *= \)\".*\"/\1\"$driver\"/" \
  --expression "s/^\(nvidia_container_toolkit_version *= \)\".*\"/\1\"$toolkit\"/" \
  --expression "s/^\(actions_runner_version *= \)\".*\"/\1\"$runner\"/" \
  --expression "s/^\(actions_runner_sha256 *= \)\".*\"/\1\"$sha256\"/" "$file"
