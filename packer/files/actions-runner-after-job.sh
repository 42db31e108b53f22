#!/usr/bin/env bash
# A registration is good for one job, and an instance without one costs as much as one with: it is powered off after its job, which
# terminates it where it was launched so. POWER_OFF_AFTER_JOB=false in /etc/gpu-bringup/actions-runner.conf keeps it.
set -euo pipefail

POWER_OFF_AFTER_JOB=true
# shellcheck source=/dev/null
. /etc/gpu-bringup/actions-runner.conf
# Not after `systemctl stop`, nor after a crash that somebody may want to see.
if [ "${SERVICE_RESULT:?}" = success ] && [ "${EXIT_CODE:-}" = exited ] && [ "$POWER_OFF_AFTER_JOB" = true ] &&
  [ "$(systemctl list-jobs --no-legend | grep --count 'actions-runner.service.*stop')" = 0 ]; then
  echo "the runner has done its job: this instance is powered off"
  systemctl poweroff --no-block
fi
