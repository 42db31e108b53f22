#!/usr/bin/env bash
# Installs NVIDIA's container toolkit and lets it describe the GPUs of each instance at boot (CDI). containerd is configured
# by whoever joins the node to its cluster, which finds the toolkit's runtime by itself.
set -euo pipefail

: "${NVIDIA_CONTAINER_TOOLKIT_VERSION:?}"

# From the repository of the driver, whose packages are signed. All four by version: they are released together, and the
# package manager would take the newest of those that are not named.
version=$NVIDIA_CONTAINER_TOOLKIT_VERSION
packages=(nvidia-container-toolkit nvidia-container-toolkit-base libnvidia-container-tools libnvidia-container1)
if command -v dnf >/dev/null; then
  dnf --assumeyes install "${packages[@]/%/-$version}"
  dnf versionlock add 'nvidia-container-toolkit*' 'libnvidia-container*'
else
  export DEBIAN_FRONTEND=noninteractive
  apt-get --quiet --yes --option DPkg::Lock::Timeout=300 --no-install-recommends install "${packages[@]/%/=$version-*}"
  apt-mark hold "${packages[@]}"
fi

# 1.19.0 orders it after multi-user.target, which waits for the validation, which waits for it: systemd breaks the circle by leaving
# the validation out. A unit in /etc goes before the package's.
unit=nvidia-cdi-refresh.service
sed '/^After=multi-user\.target$/d' "/usr/lib/systemd/system/$unit" >"/etc/systemd/system/$unit"
systemctl daemon-reload
systemctl enable nvidia-cdi-refresh.path nvidia-cdi-refresh.service
