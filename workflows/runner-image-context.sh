#!/usr/bin/env bash
# Makes the folder that packer/runner-gpu/Dockerfile copies from, out of what `cargo xtask dist` left.
#
#     workflows/runner-image-context.sh DIST FOLDER
set -euo pipefail

usage='usage: runner-image-context.sh DIST FOLDER'
dist=${1:?$usage} folder=${2:?$usage}
checkout=$(dirname -- "${BASH_SOURCE[0]}")/..
mkdir -- "$folder"
install --mode=0755 "$dist/gpu-validator" "$folder/gpu-validator"
install --mode=0644 "$dist/gpu-validator.1" "$folder/gpu-validator.1"
cp --recursive "$checkout/workflows/hooks" "$checkout/manifests/profiles" "$folder/"
