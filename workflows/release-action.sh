#!/usr/bin/env bash
# Prints action.yml with the version and the checksums of a release as defaults, so that `uses: OWNER/gpu-bringup@v1` needs no inputs.
#
#     workflows/release-action.sh 1.2.3 SHA256SUMS >action.yml.new
set -euo pipefail

version=${1:?usage: release-action.sh VERSION SHA256SUMS} sums=${2:?usage: release-action.sh VERSION SHA256SUMS}
folder=$(dirname -- "${BASH_SOURCE[0]}")

stop() {
  echo "error: $1" >&2
  exit 1
}

[[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || stop "'$version' is no version, expected one such as 1.2.3"

sum_of() {
  local sum
  sum=$(awk -v file="$1" '$2 == file { print $1 }' "$sums")
  [[ "$sum" =~ ^[0-9a-f]{64}$ ]] || stop "$sums has no checksum of $1"
  echo "$sum"
}

x86_64=$(sum_of gpu-validator)
aarch64=$(sum_of gpu-validator-aarch64)
awk -v version="$version" -v x86_64="$x86_64" -v aarch64="$aarch64" '
  /^  [a-z0-9-]+:$/ { input = $1 }
  /^    default:/ && input == "version:" { print "    default: \"" version "\""; written++; next }
  /^    default:/ && input == "sha256:" { print "    default: \"" x86_64 "\""; written++; next }
  /^    default:/ && input == "sha256-aarch64:" { print "    default: \"" aarch64 "\""; written++; next }
  { print }
  END { exit written != 3 }' "$folder/../action.yml" || stop "action.yml has not the inputs version, sha256 and sha256-aarch64, each with a default"
