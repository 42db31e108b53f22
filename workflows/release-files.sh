#!/usr/bin/env bash
# Collects what the build jobs left (BUILT/dist-x86_64, BUILT/dist-aarch64) into FOLDER under the names that a release has, with the script that
# installs this version, and writes SHA256SUMS over all of them. A file that is missing is an error.
#
#     workflows/release-files.sh built release
set -euo pipefail

built=${1:?usage: release-files.sh BUILT FOLDER} folder=${2:?usage: release-files.sh BUILT FOLDER}
mkdir -p "$folder"

for architecture in x86_64 aarch64; do
  from=$built/dist-$architecture
  # The name without an architecture is older than the second one.
  suffix=-$architecture
  if [ "$architecture" = x86_64 ]; then
    suffix=
  fi
  # What was built is what arrived.
  (cd "$from/dist" && sha256sum --check --quiet SHA256SUMS)
  install --mode=0755 "$from/dist/gpu-validator" "$folder/gpu-validator$suffix"
  install --mode=0644 "$from/dist/gpu-validator.cdx.json" "$folder/gpu-validator$suffix.cdx.json"
  install --mode=0644 "$from/packages/gpu-validator.deb" "$folder/gpu-validator-$architecture.deb"
  install --mode=0644 "$from/packages/gpu-validator.rpm" "$folder/gpu-validator-$architecture.rpm"
done
install --mode=0644 "$built/dist-x86_64/dist/gpu-validator.1" "$folder/gpu-validator.1"
tar --create --gzip --file "$folder/gpu-validator-completions.tar.gz" --directory "$built/dist-x86_64/dist" completions
install --mode=0644 "$built/images/kubernetes-images.yaml" "$folder/kubernetes-images.yaml"
checkout=$(dirname -- "${BASH_SOURCE[0]}")/..
version=$(sed --quiet 's/^version = "\(.*\)"$/\1/p' "$checkout/Cargo.toml")
sed "s/^version=''\$/version='$version'/" "$checkout/install.sh" >"$folder/install.sh"
grep --quiet --line-regexp "version='[0-9]*\.[0-9]*\.[0-9]*'" "$folder/install.sh" || {
  echo "error: install.sh has no line for version '$version'" >&2
  exit 1
}
chmod 0755 "$folder/install.sh"
# Everything in the folder, by plain names, in an order that does not change.
rm -f -- "$folder/SHA256SUMS"
sums=$(cd "$folder" && find . -maxdepth 1 -type f -printf '%f\0' | LC_ALL=C sort --zero-terminated | xargs -0 sha256sum)
echo "$sums" >"$folder/SHA256SUMS"
