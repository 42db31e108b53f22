#!/bin/bash
# Makes a disk on which a machine boots, as the provisioners leave it: unpacks Debian, runs them there, and writes an ext4
# file system and beside it the kernel. Runs as root of a mount namespace of its own, and keeps the tree in memory.
#
# USERLAND is the archive of Debian, SIMULATED what the stand-ins read, UPLOADED what Packer uploads, PROVISIONERS and BOOT
# this project's folders, SIMULATOR the simulated GPUs' folder, TEMPLATE, GPU_FAMILY and GATED_UNIT as in packer/, OUT a
# folder for `disk`, `vmlinuz` and `initrd`.
set -euo pipefail

: "${USERLAND:?}" "${SIMULATED:?}" "${UPLOADED:?}" "${PROVISIONERS:?}" "${BOOT:?}" "${SIMULATOR:?}" "${TEMPLATE:?}" "${GPU_FAMILY:?}" \
  "${GATED_UNIT:?}" "${OUT:?}"

root=$OUT/root
mkdir -p "$root"
mount -t tmpfs -o size=2g,mode=755 image "$root"
# Device nodes need the real root, and the kernel makes them at boot.
tar --extract --file "$USERLAND" --directory "$root" --exclude='./dev/*'
cp "$root"/boot/vmlinuz-* "$OUT/vmlinuz"
cp "$root"/boot/initrd.img-* "$OUT/initrd"
rm -r "${root:?}"/boot/*

# What Amazon's and Canonical's images bring, before the provisioners.
cp --recursive --no-preserve=ownership "$BOOT/root/." "$root/"
cp --archive --no-preserve=ownership "$SIMULATED" "$root/simulated"
if [ -d "$SIMULATED/base" ]; then
  cp --recursive --no-preserve=ownership "$SIMULATED/base/." "$root/"
fi
cp --recursive --no-preserve=ownership "$SIMULATOR" "$root/srv/simulator"
cp --recursive --no-preserve=ownership "$UPLOADED" "$root/tmp/gpu-bringup"
cp --recursive --no-preserve=ownership "$PROVISIONERS" "$root/tmp/provisioners"

# Package managers and the driver's programs only: what changes units, files and users is real.
package_manager=(apt-get apt-mark cloud-init dpkg dpkg-query)
[ "$TEMPLATE" != eks-gpu-al2023 ] || package_manager=(dnf)
for program in "${package_manager[@]}" containerd curl dkms gpg journalctl modprobe nvidia-smi rpm uname; do
  ln -s machine "$root/simulated/stand-ins/$program"
done

mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"

inside() {
  chroot "$root" /usr/bin/env -i HOME=/root PATH=/simulated/stand-ins:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

# provision SCRIPT [NAME=VALUE…], in the order of packer/build.pkr.hcl
provision() {
  local script=$1
  shift
  inside UPLOADED_FOLDER=/tmp/gpu-bringup GPU_FAMILY="$GPU_FAMILY" "$@" bash "/tmp/provisioners/$script"
}

provision wait-for-cloud-init.sh
case "$TEMPLATE" in
  eks-gpu-al2023) driver=install-nvidia-driver-al2023.sh ;;
  *) driver=install-nvidia-driver-ubuntu.sh ;;
esac
provision "$driver" NVIDIA_DRIVER_VERSION="$NVIDIA_DRIVER_VERSION" NVIDIA_KERNEL_MODULE=open FABRIC_MANAGER=false CUDA_TOOLKIT_VERSION= \
  CUDA_KEYRING_SHA256="$CUDA_KEYRING_SHA256"
provision install-container-toolkit.sh NVIDIA_CONTAINER_TOOLKIT_VERSION=1.19.0
if [ "$TEMPLATE" = eks-gpu-ubuntu2204 ]; then
  provision configure-containerd-ubuntu.sh
fi
provision install-gpu-validator.sh GATED_UNIT="$GATED_UNIT"
if [ "$TEMPLATE" = ubuntu2404-runner ]; then
  provision install-actions-runner.sh ACTIONS_RUNNER_VERSION="$ACTIONS_RUNNER_VERSION" ACTIONS_RUNNER_SHA256="$ACTIONS_RUNNER_SHA256"
fi

# Who starts the gated unit: nodeadm on Amazon Linux, user data that cloud-init runs on Ubuntu.
case "$TEMPLATE" in
  eks-gpu-al2023) inside systemctl --quiet enable nodeadm-run.service ;;
  *)
    inside systemctl --quiet enable cloud-init-local.service cloud-init.service cloud-config.service cloud-final.service
    ln -sf /usr/libexec/boot-test/cloud-init "$root/usr/bin/cloud-init"
    ;;
esac
if [ "$TEMPLATE" = ubuntu2404-runner ]; then
  ln -sf /usr/libexec/boot-test/gated "$root/opt/actions-runner/run.sh"
fi
inside systemctl --quiet enable systemd-networkd.service simulated-gpus.service after-boot.service
echo "$GATED_UNIT" >"$root/usr/libexec/boot-test/gated-unit"

# The validator looks at simulated GPUs: the unit's own command line and environment, and where those are.
unit=$root/etc/systemd/system/gpu-validator-firstboot.service
{
  printf '[Unit]\nRequires=simulated-gpus.service\nAfter=simulated-gpus.service\n'
  printf '[Service]\nUnsetEnvironment=\nEnvironmentFile=/srv/simulated-gpus.environment\nReadWritePaths=/srv/simulated-gpus\nExecStart=\n'
  # Software emulation takes its time: drivers may, too, and the run as a whole may not.
  sed --quiet '/^ExecStart=/,/[^\\]$/p' "$unit" | sed '$s|$| --sysroot /srv/simulated-gpus/sysroot --deadline-scale 10|'
} >"$unit.d/90-simulated.conf"

provision clean-image.sh
rm -r "$root/tmp/provisioners"
umount --recursive "$root/dev" "$root/proc"
rm -f "$OUT/disk"
mke2fs -q -t ext4 -L root -d "$root" "$OUT/disk" 1500M
umount "$root"
