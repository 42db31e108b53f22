#!/bin/bash
# Slurm's HealthCheckProgram: drains a node whose GPUs may not take work, and resumes it once they may, if it drained it. Prolog and epilog
# are the same check without the second half.
#
# Fit is exit code 0 of `gpu-validator run --level quick`, or 4: GPUs that jobs are using. Everything else drains the node, also a run that
# could not judge.
set -uo pipefail

# slurmd gives its health check no PATH, and prolog and epilog variables of the job: what would change which GPUs are read is
# taken away.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
unset CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES LD_PRELOAD LD_LIBRARY_PATH

# A reason of ours begins so.
prefix='gpu-validator: '
# Slurm ends a health check after 60 s.
deadline_s=50

settings=${VALIDATOR_SETTINGS:-/etc/gpu-validator/environment}
if [ -r "$settings" ]; then
  set -a
  # shellcheck source=/dev/null
  . "$settings"
  set +a
fi

node=${SLURMD_NODENAME:-}
if [ -z "$node" ]; then
  echo "SLURMD_NODENAME is not set: this is started by slurmd" >&2
  exit 3
fi

# `idle|none`, `drained|gpu-validator: …`: the state and its reason.
shown=$(sinfo --noheader --Node --nodes="$node" --format='%T|%E' | head --lines=1)
if [ -z "$shown" ]; then
  echo "sinfo returned no state of node $node" >&2
  exit 1
fi
state=${shown%%|*}
reason=${shown#*|}

output=$(timeout --kill-after=5 "$deadline_s" "${VALIDATOR:-gpu-validator}" run --level quick --color never)
code=$?
# The first line is the answer of the run. Warnings and bad input are on standard error, which slurmd logs.
answer=$(head --lines=1 <<<"$output" | tr --delete '"\134' | cut --characters=1-200)
case $code in
  0 | 4) fit=yes ;;
  124 | 137) fit=no answer="no verdict within $deadline_s s" ;;
  *) fit=no answer=${answer:-no verdict, exit code $code: the error is in the log of slurmd} ;;
esac

if [ "$fit" = no ]; then
  echo "$answer" >&2
  case $state in
    # Its reason stays: that of an administrator, or the first finding.
    drain*) ;;
    *) scontrol update NodeName="$node" State=DRAIN Reason="$prefix$answer" ;;
  esac
  # Slurm requeues the job of a prolog that fails.
  exit 1
fi

if [ "${VALIDATOR_MAY_RESUME:-yes}" = yes ]; then
  case $state in
    drain*)
      case $reason in
        "$prefix"*) scontrol update NodeName="$node" State=RESUME ;;
      esac
      ;;
  esac
fi
