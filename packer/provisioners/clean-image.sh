#!/usr/bin/env bash
# Removes what belongs to the build instance alone: identities, keys, histories, caches, logs. Level image looks afterwards.
# The connection of the build lives on without its key. UPLOADED_FOLDER comes from the template.
set -euo pipefail

: "${UPLOADED_FOLDER:?}"

rm --recursive --force "$UPLOADED_FOLDER"

if command -v dnf >/dev/null; then
  dnf clean all
  rm --recursive --force /var/cache/dnf
else
  apt-get clean
  rm --recursive --force /var/lib/apt/lists/*
fi

rm --force /etc/ssh/ssh_host_*
rm --force /root/.ssh/authorized_keys /home/*/.ssh/authorized_keys
rm --force /root/.bash_history /home/*/.bash_history /root/.python_history /home/*/.python_history /root/.lesshst /home/*/.lesshst
# An empty file makes systemd draw a new machine id at the next boot; without the file it would take that for a first
# installation.
truncate --size=0 /etc/machine-id
rm --recursive --force /var/lib/cloud/instance /var/lib/cloud/instances /var/lib/cloud/data /var/lib/cloud/sem
# CDI's specification names the build instance's GPUs. The service writes a new one at boot.
rm --force /var/run/cdi/nvidia.yaml /etc/cdi/nvidia.yaml
rm --recursive --force /var/log/gpu-validator

journalctl --rotate
journalctl --vacuum-time=1s
find /var/log -type f \( -name '*.gz' -o -name '*-[0-9]*' \) -delete
find /var/log -type f -not -path '/var/log/journal/*' -exec truncate --size=0 {} +
