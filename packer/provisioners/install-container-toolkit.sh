#!/usr/bin/env bash
# Installs NVIDIA's container toolkit and lets it describe the GPUs of each instance at boot (CDI). containerd is configured
# by EKS's nodeadm, which finds the toolkit's runtime by itself.
set -euo pipefail

: "${NVIDIA_CONTAINER_TOOLKIT_VERSION:?}"

# From the repository of the driver, whose packages are signed. All four by version: they are released together, and dnf
# would take the newest of those that are not named.
version=$NVIDIA_CONTAINER_TOOLKIT_VERSION
dnf --assumeyes install \
  "nvidia-container-toolkit-$version" \
  "nvidia-container-toolkit-base-$version" \
  "libnvidia-container-tools-$version" \
  "libnvidia-container1-$version"
dnf versionlock add 'nvidia-container-toolkit*' 'libnvidia-container*'

systemctl enable nvidia-cdi-refresh.path nvidia-cdi-refresh.service
systemctl start nvidia-cdi-refresh.service
# The specification names this instance's GPUs; a list without any would only be found out by the first pod.
devices=$(nvidia-ctk cdi list)
if [[ "$devices" != *nvidia.com/gpu=* ]]; then
  echo "the CDI specification names no GPU: ${devices:-it is empty}" >&2
  exit 1
fi
