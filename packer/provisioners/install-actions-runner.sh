#!/usr/bin/env bash
# Installs the GitHub Actions runner under a user of its own, with hooks that look at the GPUs before and after each job, rootless Docker
# for jobs in containers, ccache, and the Python packages that jobs expect. Everything that decides whether a job may run is root's. The
# runner is registered on each instance by actions-runner-registration.service, never in the image. UPLOADED_FOLDER, ACTIONS_RUNNER_VERSION and
# ACTIONS_RUNNER_SHA256 come from the template.
set -euo pipefail

: "${UPLOADED_FOLDER:?}" "${ACTIONS_RUNNER_VERSION:?}" "${ACTIONS_RUNNER_SHA256:?}"

files=$UPLOADED_FOLDER/files
folder=/opt/actions-runner
archive=/tmp/actions-runner.tar.gz

export DEBIAN_FRONTEND=noninteractive
apt-get --quiet --yes --option DPkg::Lock::Timeout=300 --no-install-recommends install \
  ccache curl docker-buildx docker.io fuse-overlayfs git git-lfs jq nftables python3-numpy python3-yaml rootlesskit slirp4netns sudo uidmap
# Docker of root would make root of every job.
systemctl disable --now docker.service docker.socket

id runner >/dev/null 2>&1 || useradd --create-home --shell /bin/bash runner
# Xids are in the kernel log, which Ubuntu closes to others (kernel.dmesg_restrict): without it nothing could be judged.
usermod --append --groups adm,systemd-journal runner

curl --proto '=https' --fail --silent --show-error --location --output "$archive" \
  "https://github.com/actions/runner/releases/download/v$ACTIONS_RUNNER_VERSION/actions-runner-linux-x64-$ACTIONS_RUNNER_VERSION.tar.gz"
echo "$ACTIONS_RUNNER_SHA256  $archive" | sha256sum --check --quiet
# The runner writes its registration and logs beside its programs. With the sticky bit it adds files to the folder and replaces none
# of root's. It cannot update itself: a newer one comes with a newer image.
install --directory --owner=root --group=runner --mode=1775 "$folder"
tar --extract --gzip --file "$archive" --directory "$folder" --no-same-owner
rm "$archive"
chown --recursive root:root "$folder"
chown root:runner "$folder"
chmod --recursive go-w "$folder"
chmod 1775 "$folder"
install --directory --owner=runner --group=runner --mode=0755 "$folder/_work" "$folder/_diag"
# The compiler cache is a folder of its own. A volume with the label ccache is mounted there, so that what one instance compiled is
# there on the next that gets the volume or a copy of it; without one the instance starts with an empty cache.
install --directory --owner=runner --group=runner --mode=0755 /var/cache/ccache
echo 'LABEL=ccache /var/cache/ccache auto nofail,noatime,nodev,nosuid,x-systemd.device-timeout=5s,x-systemd.before=actions-runner.service 0 0' >>/etc/fstab

# .NET's libraries, as the runner itself lists them.
"$folder/bin/installdependencies.sh"

programs=/usr/libexec/gpu-bringup
for program in start after-job job-hook registration; do
  install -D --owner=root --mode=0755 "$files/actions-runner-$program.sh" "$programs/actions-runner-$program.sh"
done
for hook in pre-job post-job; do
  install -D --owner=root --mode=0755 "$files/actions-runner-$hook.sh" "/opt/gpu-bringup/hooks/$hook.sh"
done
install -D --owner=root --mode=0440 "$files/actions-runner.sudoers" /etc/sudoers.d/gpu-bringup-actions-runner
install -D --owner=root --mode=0644 "$files/actions-runner-metadata.nft" /etc/gpu-bringup/actions-runner-metadata.nft
# Where the hooks keep what they know from one job to the next, and the quarantine.
install --directory --owner=root --mode=0755 /var/lib/gpu-validator
echo 'GPU_VALIDATOR_HOOK_STATE=/var/lib/gpu-validator' >/etc/gpu-validator/hook.env
chmod 0644 /etc/gpu-validator/hook.env
# The runner reads it as it starts. It is root's, as is everything that it names.
cat /etc/gpu-validator/environment - >"$folder/.env" <<EOF
ACTIONS_RUNNER_HOOK_JOB_STARTED=/opt/gpu-bringup/hooks/pre-job.sh
ACTIONS_RUNNER_HOOK_JOB_COMPLETED=/opt/gpu-bringup/hooks/post-job.sh
DOCKER_HOST=unix:///run/actions-runner-docker/docker.sock
CCACHE_DIR=/var/cache/ccache
EOF
chmod 0644 "$folder/.env"
# The runner mounts this path into containers.
install --directory /etc/tmpfiles.d
echo 'L /run/docker.sock - - - - /run/actions-runner-docker/docker.sock' >/etc/tmpfiles.d/gpu-bringup-actions-runner.conf

units=(actions-runner.service actions-runner-docker.service actions-runner-metadata.service)
for unit in "${units[@]}" actions-runner-registration.service; do
  install -D --mode=0644 "$files/$unit" "/etc/systemd/system/$unit"
done
systemctl daemon-reload
systemctl enable "${units[@]}"
