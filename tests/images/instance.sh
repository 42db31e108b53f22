#!/bin/bash
# Makes the root of a simulated build instance, in namespaces of its own, says `ready`, and holds it until it is killed.
# Arguments: the folder to mount it on, the userland to copy, the folder that becomes /simulated.
set -euo pipefail

root=$1
userland=$2
simulated=$3

# In memory, so that the free space is the same everywhere and nothing is left.
mount -t tmpfs -o size=1g,mode=755 instance "$root"
umask 022
cp --archive "$userland/." "$root/"
ln -sf bash "$root/bin/sh"
ln -sf gawk "$root/usr/bin/awk"
cp --archive "$simulated" "$root/simulated"
for program in apt-get apt-mark chown cloud-init containerd curl dkms dnf dpkg dpkg-query gpg journalctl modprobe nvidia-smi rpm sudo systemctl uname useradd usermod; do
  ln -s machine "$root/simulated/stand-ins/$program"
done
# Where there are users, files have owners.
if [ -e "$simulated/users" ]; then
  rm "$root/simulated/stand-ins/chown"
fi
# One family's package manager, as provisioners look which there is.
if [ "$(cat "$simulated/os")" = amzn ]; then
  rm "$root"/simulated/stand-ins/{apt-get,apt-mark,dpkg,dpkg-query}
else
  rm "$root/simulated/stand-ins/dnf"
fi

mkdir -p "$root"/{proc,dev,tmp,root,simulated,etc/ssh,etc/systemd/system,run/systemd/system,var/tmp,var/log,var/cache}
mkdir -p "$root"/{sys/bus/pci/devices,sys/fs/cgroup/system.slice,usr/lib/systemd/system}
chmod 1777 "$root/tmp" "$root/var/tmp"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
cp "$simulated/os-release" "$root/etc/os-release"
printf 'root:x:0:0:root:/root:/bin/bash\n' >"$root/etc/passwd"
printf '%s\n' root:x:0: adm:x:4: systemd-journal:x:101: docker:x:102: >"$root/etc/group"
# What the image that a template starts from brings.
if [ -d "$simulated/base" ]; then
  cp --recursive "$simulated/base/." "$root/"
fi

kernel=$(cat "$simulated/kernel-release")
mkdir -p "$root/lib/modules/$kernel"
touch "$root/lib/modules/$kernel/modules.builtin"

# What a running instance has and an image must not.
mkdir -p "$root/home/user/.ssh" "$root/var/lib/cloud/instances/i-0"
echo key >"$root/etc/ssh/ssh_host_ed25519_key"
echo key >"$root/home/user/.ssh/authorized_keys"
echo 0123456789abcdef0123456789abcdef >"$root/etc/machine-id"
echo data >"$root/var/lib/cloud/instances/i-0/user-data.txt"
ln -s instances/i-0 "$root/var/lib/cloud/instance"
echo ls >"$root/root/.bash_history"

echo ready
exec sleep infinity
