#!/usr/bin/env bash
# Installs NVIDIA's driver on Amazon Linux 2023 for the running kernel, and holds both at their versions. Needs no GPU.
# GPU_FAMILY, NVIDIA_DRIVER_VERSION, NVIDIA_KERNEL_MODULE (open or proprietary), FABRIC_MANAGER (true or false) and
# CUDA_TOOLKIT_VERSION (may be empty) come from the template.
set -euo pipefail

: "${GPU_FAMILY:?}" "${NVIDIA_DRIVER_VERSION:?}" "${NVIDIA_KERNEL_MODULE:?}" "${FABRIC_MANAGER:?}" "${CUDA_TOOLKIT_VERSION?}"

running_kernel=$(uname --kernel-release)
driver_branch=${NVIDIA_DRIVER_VERSION%%.*}

# Amazon's kernel 6.1 is the package `kernel`; later series carry theirs in the name, such as `kernel6.12`.
kernel_series=$(cut --delimiter=. --fields=1,2 <<<"$running_kernel")
case "$kernel_series" in
  6.1) kernel_package=kernel ;;
  *) kernel_package=kernel$kernel_series ;;
esac

# The modules are built for the kernel that runs now; one that is newer at the first boot would have none.
dnf --assumeyes install dnf-plugins-core dkms "$kernel_package-devel-$running_kernel"
dnf versionlock add 'kernel*'

# The repository names its key by an address beside its packages, which dnf would take whatever it held. NVIDIA's key for RPM
# repositories since 2022: "Updating the CUDA Linux GPG Repository Key", https://developer.nvidia.com/blog/.
repository=https://developer.download.nvidia.com/compute/cuda/repos/amzn2023/x86_64
key=/etc/pki/rpm-gpg/RPM-GPG-KEY-NVIDIA-D42D0685
fingerprint=610C7B14E068A878070DA4E99CD0A493D42D0685
install --directory /etc/pki/rpm-gpg
curl --proto '=https' --fail --silent --show-error --location --output "$key" "$repository/D42D0685.pub"
found=$(gpg --show-keys --with-colons "$key" | awk -F: '$1 == "pub" { wanted = 1; keys += 1 } $1 == "fpr" && wanted { print $10; wanted = 0 } END { if (keys != 1) print keys " keys" }')
if [ "$found" != "$fingerprint" ]; then
  echo "$repository/D42D0685.pub has the fingerprint $found, expected $fingerprint" >&2
  rm "$key"
  exit 1
fi
rpm --import "$key"
dnf config-manager --add-repo "$repository/cuda-amzn2023.repo"
dnf config-manager --save --setopt='cuda-amzn2023*.gpgcheck=1' --setopt="cuda-amzn2023*.gpgkey=file://$key"

# Without module_hotfixes dnf sees the packages of one module stream alone, which need not hold the version asked for.
install_nvidia() {
  dnf --assumeyes --setopt='cuda-amzn2023*.module_hotfixes=true' install "$@"
}

install --directory /etc/modprobe.d /etc/modules-load.d

case "$NVIDIA_KERNEL_MODULE" in
  open) kernel_module_package=kmod-nvidia-open-dkms ;;
  proprietary) kernel_module_package=kmod-nvidia-latest-dkms ;;
  *)
    echo "the kernel module is '$NVIDIA_KERNEL_MODULE'; it must be open or proprietary" >&2
    exit 1
    ;;
esac
packages=(
  "$kernel_module_package-$NVIDIA_DRIVER_VERSION"
  "nvidia-driver-cuda-$NVIDIA_DRIVER_VERSION"
  "nvidia-persistenced-$NVIDIA_DRIVER_VERSION"
)
if [ "$FABRIC_MANAGER" = true ]; then
  # The package lost a dash with branch 580.
  if [ "$driver_branch" -ge 580 ]; then
    packages+=("nvidia-fabricmanager-$NVIDIA_DRIVER_VERSION")
  else
    packages+=("nvidia-fabric-manager-$NVIDIA_DRIVER_VERSION")
  fi
fi
if [ "$GPU_FAMILY" = p6-b200 ]; then
  # Switches of the fourth generation are managed through InfiniBand: Fabric Manager User Guide, "Systems Using Fourth
  # Generation NVSwitches".
  packages+=(nvlsm libibumad infiniband-diags)
  # The kernel's own package lacks ib_umad (awslabs/amazon-eks-ami, templates/al2023/provisioners/install-nvidia-driver.sh).
  dnf --assumeyes install "$kernel_package-modules-extra-$running_kernel" "$kernel_package-modules-extra-common-$running_kernel"
  echo ib_umad >/etc/modules-load.d/ib_umad.conf
fi
install_nvidia "${packages[@]}"
dnf versionlock add '*nvidia*'

if [ "$NVIDIA_KERNEL_MODULE" = proprietary ]; then
  case "$GPU_FAMILY" in
    # As in the EKS images: awslabs/amazon-eks-ami#1523.
    g4dn | g5) echo 'options nvidia NVreg_EnableGpuFirmware=0' >/etc/modprobe.d/nvidia-gsp-firmware.conf ;;
  esac
fi
printf '%s\n' nvidia nvidia_uvm >/etc/modules-load.d/nvidia.conf

# A module that is not built for this kernel must end the build here and not at a node's boot.
built_modules=$(dkms status -k "$running_kernel")
if [[ "$built_modules" != *": installed"* ]]; then
  echo "dkms built no module for kernel $running_kernel: ${built_modules:-nothing is built}" >&2
  exit 1
fi

systemctl enable nvidia-persistenced.service
if [ "$FABRIC_MANAGER" = true ]; then
  systemctl enable nvidia-fabricmanager.service
fi

if [ -n "$CUDA_TOOLKIT_VERSION" ]; then
  # 12.8 is the package cuda-toolkit-12-8.
  dnf --assumeyes install "cuda-toolkit-${CUDA_TOOLKIT_VERSION/./-}"
  dnf versionlock add 'cuda-toolkit*'
fi

# For people who look at a node. It is in Amazon's supplementary packages, and no node is worse without it.
if dnf --assumeyes install spal-release && dnf --assumeyes install nvtop; then
  dnf versionlock add nvtop
else
  echo "nvtop is not in the repositories of this release; the image goes without" >&2
fi
