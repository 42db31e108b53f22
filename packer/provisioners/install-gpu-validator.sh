#!/usr/bin/env bash
# Installs gpu-validator with its man page, the profiles, and the unit that keeps kubelet from starting on a node that does
# not pass. UPLOADED_FOLDER holds the files, GPU_FAMILY names the profile; both come from the template.
set -euo pipefail

: "${UPLOADED_FOLDER:?}" "${GPU_FAMILY:?}"

profile=/etc/gpu-validator/profiles/$GPU_FAMILY.yaml

install -D --mode=0755 "$UPLOADED_FOLDER/gpu-validator" /usr/bin/gpu-validator
install -D --mode=0644 "$UPLOADED_FOLDER/gpu-validator.1" /usr/share/man/man1/gpu-validator.1
install --directory --mode=0755 /etc/gpu-validator/profiles
install --mode=0644 "$UPLOADED_FOLDER"/profiles/*.yaml /etc/gpu-validator/profiles/
# Read by the unit, and by hooks and people that run gpu-validator on the node.
printf 'GPU_VALIDATOR_PROFILE=%s\n' "$profile" >/etc/gpu-validator/environment

install -D --mode=0644 "$UPLOADED_FOLDER/gpu-validator-firstboot.service" /etc/systemd/system/gpu-validator-firstboot.service
install -D --mode=0644 "$UPLOADED_FOLDER/kubelet-requires-gpu-validator.conf" \
  /etc/systemd/system/kubelet.service.d/50-gpu-validator.conf
systemctl daemon-reload
systemctl enable gpu-validator-firstboot.service

rm --recursive "$UPLOADED_FOLDER"
gpu-validator --version
gpu-validator profile check "$profile"
