#!/usr/bin/env bash
# Installs gpu-validator with its man page, the profiles, and the unit that keeps work from an instance that does not pass.
# UPLOADED_FOLDER holds the files, GPU_FAMILY names the profile, GATED_UNIT is what must wait (kubelet or the runner),
# SENTINEL_ENABLED is whether idle GPUs are worked (docs/sentinel.md); all come from the template.
set -euo pipefail

: "${UPLOADED_FOLDER:?}" "${GPU_FAMILY:?}" "${GATED_UNIT:?}"

files=$UPLOADED_FOLDER/files
profile=/etc/gpu-validator/profiles/$GPU_FAMILY.yaml

install -D --mode=0755 "$UPLOADED_FOLDER/gpu-validator" /usr/bin/gpu-validator
install -D --mode=0644 "$UPLOADED_FOLDER/gpu-validator.1" /usr/share/man/man1/gpu-validator.1
install --directory --mode=0755 /etc/gpu-validator/profiles
install --mode=0644 "$UPLOADED_FOLDER"/profiles/*.yaml /etc/gpu-validator/profiles/
gpu-validator --version
gpu-validator profile check "$profile"

# Read by the unit, and by hooks and people that run gpu-validator on the node.
cat >/etc/gpu-validator/environment <<EOF
GPU_VALIDATOR_PROFILE=$profile
GPU_VALIDATOR_FORBID_SIMULATED=true
EOF

units=/etc/systemd/system
install -D --mode=0644 "$files/gpu-validator-firstboot.service" "$units/gpu-validator-firstboot.service"
# The profile's time limit is the validator's own, which then writes its reports. systemd's is the net below it.
deadline_s=$(gpu-validator profile show "$profile" --key levels.standard.deadline_s)
if ! [[ "$deadline_s" =~ ^[0-9]+(\.[0-9]+)?$ ]]; then
  echo "$profile gives level standard no time limit (levels.standard.deadline_s is '$deadline_s')" >&2
  exit 1
fi
install --directory "$units/gpu-validator-firstboot.service.d"
printf '[Service]\nTimeoutStartSec=%d\n' "$((${deadline_s%.*} + 30))" >"$units/gpu-validator-firstboot.service.d/50-deadline.conf"

on_failure=$(gpu-validator profile show "$profile" --key firstboot.on_failure)
case "$on_failure $GATED_UNIT" in
  withhold_kubelet\ *)
    drop_in=requires-gpu-validator.conf
    install -D --mode=0755 "$files/gpu-validator-withheld.sh" /usr/libexec/gpu-validator/withheld.sh
    install -D --mode=0644 "$files/gpu-validator-withheld.service" "$units/gpu-validator-withheld.service"
    printf '[Unit]\nOnFailure=gpu-validator-withheld.service\n' >"$units/gpu-validator-firstboot.service.d/50-withheld.conf"
    ;;
  "taint_node kubelet.service")
    drop_in=kubelet-taints-unvalidated.conf
    install -D --mode=0755 "$files/kubelet-taints-unvalidated.sh" /usr/libexec/gpu-validator/kubelet-taints-unvalidated.sh
    ;;
  *)
    echo "$profile wants $on_failure, which $GATED_UNIT cannot carry out: only Amazon Linux's kubelet.service takes taints here" >&2
    exit 1
    ;;
esac
install -D --mode=0644 "$files/$drop_in" "$units/$GATED_UNIT.d/50-gpu-validator.conf"
install -D --mode=0644 "$files/gpu-validator-sentinel.service" "$units/gpu-validator-sentinel.service"

systemctl daemon-reload
systemctl enable gpu-validator-firstboot.service
if [[ "${SENTINEL_ENABLED:-false}" == true ]]; then
  systemctl enable gpu-validator-sentinel.service
fi
