#!/usr/bin/env bash
# Prints manifests/kubernetes/images/kustomization.yaml of a release: the validator's image where it was pushed, and every image by digest, so
# that production takes it. The digests of others' images are those that their registry has for the tag now.
#
#     workflows/release-images.sh IMAGE VERSION DIGEST >kubernetes-images.yaml
set -euo pipefail

usage='usage: release-images.sh IMAGE VERSION DIGEST'
image=${1:?$usage} version=${2:?$usage} digest=${3:?$usage}
images=$(dirname -- "${BASH_SOURCE[0]}")/../manifests/kubernetes/images/kustomization.yaml
own=ghcr.io/gpu-bringup/gpu-validator

stop() {
  echo "error: $1" >&2
  exit 1
}

is_digest() {
  [[ "$2" =~ ^sha256:[0-9a-f]{64}$ ]] || stop "$1 has the digest '$2', expected sha256: and 64 digits"
}

is_digest "$image" "$digest"
name='' names=0 own_names=0
while IFS= read -r line; do
  case $line in
    '  - name: '*) name=${line#*: } names=$((names + 1)) ;;
    '    newTag: '*)
      tag=${line#*: }
      [ -n "$name" ] || stop "$images has a newTag without a name"
      if [ "$name" = "$own" ]; then
        [ "$tag" = "$version" ] || stop "$images has version $tag of $own, the release is $version"
        own_names=$((own_names + 1))
        printf '    newName: %s\n    newTag: %s\n    digest: %s\n' "$image" "$version" "$digest"
      else
        found=$(docker buildx imagetools inspect "$name:$tag" --format '{{.Manifest.Digest}}')
        is_digest "$name:$tag" "$found"
        printf '%s\n    digest: %s\n' "$line" "$found"
      fi
      name=''
      continue
      ;;
    '    digest: '*) stop "$images has a digest already: $line" ;;
  esac
  printf '%s\n' "$line"
done <"$images"
[[ "$own_names" = 1 && "$names" -gt 1 && -z "$name" ]] || stop "$images names $names images, $own_names of them ours"
