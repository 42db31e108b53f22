#!/usr/bin/env bash
# Installs NVIDIA's driver on Ubuntu for the running kernel, from NVIDIA's repository, and holds both at their versions.
# Needs no GPU. GPU_FAMILY, NVIDIA_DRIVER_VERSION, NVIDIA_KERNEL_MODULE (open or proprietary), FABRIC_MANAGER (true or
# false), CUDA_TOOLKIT_VERSION (may be empty) and CUDA_KEYRING_SHA256 come from the template.
set -euo pipefail

: "${GPU_FAMILY:?}" "${NVIDIA_DRIVER_VERSION:?}" "${NVIDIA_KERNEL_MODULE:?}" "${FABRIC_MANAGER:?}" "${CUDA_TOOLKIT_VERSION?}" \
  "${CUDA_KEYRING_SHA256:?}"

export DEBIAN_FRONTEND=noninteractive
running_kernel=$(uname --kernel-release)
driver_branch=${NVIDIA_DRIVER_VERSION%%.*}
# shellcheck source=/dev/null
ubuntu_version=$(. /etc/os-release && echo "${VERSION_ID/./}")

# cloud-init and unattended upgrades run apt on a fresh instance.
apt_get() {
  apt-get --quiet --yes --option DPkg::Lock::Timeout=300 --no-install-recommends "$@"
}

# The key of the repository is in this package, whose checksum is known; apt verifies everything else by the key.
repository=https://developer.download.nvidia.com/compute/cuda/repos/ubuntu$ubuntu_version/x86_64
curl --proto '=https' --fail --silent --show-error --location --output /tmp/cuda-keyring.deb "$repository/cuda-keyring_1.1-1_all.deb"
echo "$CUDA_KEYRING_SHA256  /tmp/cuda-keyring.deb" | sha256sum --check --quiet
dpkg --install /tmp/cuda-keyring.deb
rm /tmp/cuda-keyring.deb

# The driver's packages depend on one another without a version; the pin keeps all of them at the one asked for.
install --directory /etc/apt/preferences.d /etc/modprobe.d /etc/modules-load.d
cat >/etc/apt/preferences.d/nvidia-driver <<EOF
Package: *nvidia*$driver_branch* nvidia-modprobe nvidia-fabricmanager* nvidia-persistenced*
Pin: version $NVIDIA_DRIVER_VERSION*
Pin-Priority: 1001
EOF

case "$NVIDIA_KERNEL_MODULE" in
  open) suffix=-open ;;
  proprietary) suffix= ;;
  *)
    echo "the kernel module is '$NVIDIA_KERNEL_MODULE'; it must be open or proprietary" >&2
    exit 1
    ;;
esac
if [ "$driver_branch" -ge 590 ]; then
  echo "NVIDIA's packages for Ubuntu have other names from branch 590 on; this image takes branches up to 580" >&2
  exit 1
fi

packages=(
  "nvidia-headless-$driver_branch$suffix=$NVIDIA_DRIVER_VERSION-*"
  "nvidia-utils-$driver_branch=$NVIDIA_DRIVER_VERSION-*"
)
if [ "$FABRIC_MANAGER" = true ]; then
  # From branch 580 on the name with the branch is a virtual package, which has no version (NVIDIA/gpu-driver-container#451).
  if [ "$driver_branch" -ge 580 ]; then
    packages+=("nvidia-fabricmanager=$NVIDIA_DRIVER_VERSION-*")
  else
    packages+=("nvidia-fabricmanager-$driver_branch=$NVIDIA_DRIVER_VERSION-*")
  fi
fi
if [ "$GPU_FAMILY" = p6-b200 ]; then
  # Switches of the fourth generation are managed through InfiniBand: Fabric Manager User Guide, "Systems Using Fourth
  # Generation NVSwitches".
  # ib_umad is in the modules that Ubuntu's kernel for AWS leaves out.
  packages+=(nvlsm libibumad3 infiniband-diags "linux-modules-extra-$running_kernel")
  echo ib_umad >/etc/modules-load.d/ib_umad.conf
fi
apt_get update
# The modules are built for the kernel that runs now; one that is newer at the first boot would have none.
apt_get install dkms "linux-headers-$running_kernel"
apt_get install "${packages[@]}"
apt_get install nvtop

if [ "$NVIDIA_KERNEL_MODULE" = proprietary ]; then
  case "$GPU_FAMILY" in
    # As in the EKS images: awslabs/amazon-eks-ami#1523.
    g4dn | g5) echo 'options nvidia NVreg_EnableGpuFirmware=0' >/etc/modprobe.d/nvidia-gsp-firmware.conf ;;
  esac
fi
printf '%s\n' nvidia nvidia_uvm >/etc/modules-load.d/nvidia.conf

if [ -n "$CUDA_TOOLKIT_VERSION" ]; then
  # 12.8 is the package cuda-toolkit-12-8.
  apt_get install "cuda-toolkit-${CUDA_TOOLKIT_VERSION/./-}"
fi

# Kernel, driver and toolkit stay as they were validated.
held=$(dpkg-query --show --showformat='${db:Status-Abbrev} ${Package}\n' 'linux-image-*' 'linux-headers-*' 'linux-aws*' '*nvidia*' 'cuda-toolkit-*' nvtop 2>/dev/null |
  awk '$1 == "ii" { print $2 }')
if [ -z "$held" ]; then
  echo "no package of the driver is installed" >&2
  exit 1
fi
# shellcheck disable=SC2086 # one word a package
apt-mark hold $held

# A module that is not built for this kernel must end the build here and not at a node's boot.
built_modules=$(dkms status -k "$running_kernel")
if [[ "$built_modules" != *": installed"* ]]; then
  echo "dkms built no module for kernel $running_kernel: ${built_modules:-nothing is built}" >&2
  exit 1
fi

# Ubuntu's unit leaves persistence mode off, ends when nothing needs it, and has no [Install] section. The drop-in is that of
# NVIDIA/ansible-role-nvidia-driver (files/nvidia-persistenced-override.conf).
install --directory /etc/systemd/system/nvidia-persistenced.service.d
cat >/etc/systemd/system/nvidia-persistenced.service.d/50-persistence-mode.conf <<EOF
[Unit]
StopWhenUnneeded=no

[Service]
ExecStart=
ExecStart=/usr/bin/nvidia-persistenced --user root --persistence-mode --verbose
EOF
systemctl daemon-reload
systemctl add-wants multi-user.target nvidia-persistenced.service
if [ "$FABRIC_MANAGER" = true ]; then
  systemctl enable nvidia-fabricmanager.service
fi
