#!/usr/bin/env bash
# Reports that this instance is withheld. POWER_OFF_AFTER_HOURS (1 to 168) powers it off unless it has passed by then; TOPIC_ARN is a
# topic of SNS to which its role may publish. `aws ec2 get-console-output` returns what is printed. Arguments are for tests.
set -euo pipefail

report=${1:-/var/log/gpu-validator/report.json}
PATH=$PATH:/snap/bin

instance=$(jq --raw-output '.machine.ec2_instance_id // empty' "$report" 2>/dev/null || true)
instance=${instance:-$(hostname)}
findings=$(jq --raw-output '[.findings[] | select(.verdict == "fail" or .verdict == "error") | .check] | unique | join(", ")' "$report" 2>/dev/null || true)
message="gpu-validator: $instance is withheld from work: ${findings:-there is no report, see journalctl --unit gpu-validator-firstboot}"
echo "$message"

if [ -n "${POWER_OFF_AFTER_HOURS:-}" ]; then
  if ! [[ "$POWER_OFF_AFTER_HOURS" =~ ^[0-9]{1,3}$ ]] || ((POWER_OFF_AFTER_HOURS < 1 || POWER_OFF_AFTER_HOURS > 168)); then
    echo "POWER_OFF_AFTER_HOURS is '$POWER_OFF_AFTER_HOURS', expected 1 to 168" >&2
    exit 3
  fi
  # The timer of an earlier failure goes on; systemd refuses a second one of its name.
  if ! systemctl is-active --quiet gpu-validator-power-off.timer; then
    systemd-run --quiet --unit=gpu-validator-power-off --on-active="${POWER_OFF_AFTER_HOURS}h" \
      sh -c 'systemctl is-active --quiet gpu-validator-firstboot.service || systemctl poweroff'
    message="$message; it is powered off in $POWER_OFF_AFTER_HOURS h unless it passes before"
    echo "gpu-validator: this instance is powered off in $POWER_OFF_AFTER_HOURS h unless it passes before"
  fi
fi

if [ -n "${TOPIC_ARN:-}" ]; then
  # The topic's region is the fourth part of its name.
  IFS=: read -r _ _ _ region _ <<<"$TOPIC_ARN"
  aws sns publish --region "$region" --topic-arn "$TOPIC_ARN" --subject "GPU instance withheld from work" --message "$message" >/dev/null
  echo "gpu-validator: published to $TOPIC_ARN"
fi
