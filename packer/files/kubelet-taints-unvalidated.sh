#!/usr/bin/env bash
# Writes the arguments with which kubelet registers a node that gpu-validator did not pass: those of nodeadm, and the taint.
# systemd starts this before kubelet with kubelet's environment; the folder is named by the first argument in tests.
set -euo pipefail

taint=gpu-bringup.dev/unvalidated=true:NoSchedule
folder=${1:-/run/gpu-validator-kubelet}
configuration=${2:-/etc/kubernetes/kubelet/config.json}
arguments=${NODEADM_KUBELET_ARGS:?nodeadm has not configured kubelet}

rm --force "$folder/environment"
# The unit stays active after a pass and after nothing else.
if systemctl is-active --quiet gpu-validator-firstboot.service; then
  exit 0
fi

# The flag is given once and outranks the configuration file, so the taints of both must be in it. Taints are given at
# registration only: kubelet may not add one to its own node later.
if [[ " $arguments " =~ \ --register-with-taints=([^ ]*)\  ]]; then
  flag=${BASH_REMATCH[0]# }
  flag=${flag% }
  arguments=${arguments/"$flag"/"$flag,$taint"}
else
  configured=
  if [ -e "$configuration" ]; then
    configured=$(jq --raw-output '.registerWithTaints // [] | map("\(.key)=\(.value // ""):\(.effect),") | join("")' "$configuration")
  fi
  arguments="$arguments --register-with-taints=$configured$taint"
fi

# systemd takes a backslash before these characters inside of quotes.
# shellcheck disable=SC2001 # four characters at once
quoted=$(sed 's/[\\"`$]/\\&/g' <<<"$arguments")
printf 'NODEADM_KUBELET_ARGS="%s"\n' "$quoted" >"$folder/environment"
echo "gpu-validator did not pass this node: kubelet registers it with $taint" >&2
