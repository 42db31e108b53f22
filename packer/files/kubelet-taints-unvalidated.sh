#!/usr/bin/env bash
# Writes the arguments with which kubelet registers a node that gpu-validator did not pass: those of nodeadm, and the taint.
# systemd starts this before kubelet with kubelet's environment; the folder is named by the first argument in tests.
set -euo pipefail

key=gpu-bringup.dev/unvalidated
taint=$key=true:NoSchedule
folder=${1:-/run/gpu-validator-kubelet}
configuration=${2:-/etc/kubernetes/kubelet/config.json}
arguments=${NODEADM_KUBELET_ARGS:?nodeadm has not configured kubelet}

rm --force "$folder/environment"
# The unit stays active after a pass and after nothing else.
if systemctl is-active --quiet gpu-validator-firstboot.service; then
  exit 0
fi

# value FLAG: of the last one, as kubelet takes it; nothing where it is not given.
value() {
  if [[ " $arguments " =~ .*\ --$1[=\ ]([^\ ]*)\  ]]; then
    echo "${BASH_REMATCH[1]}"
  fi
}

# The taints of kubelet's configuration, `KEY=VALUE:EFFECT,` each. Files of --config-dir that end with .conf are merge patches,
# in the order of their names: a later list replaces an earlier one (kubernetes, cmd/kubelet/app/server.go).
configured_taints() {
  local file given directory files=()
  given=$(value config)
  configuration=${given:-$configuration}
  [ ! -e "$configuration" ] || files+=("$configuration")
  directory=$(value config-dir)
  if [ -n "$directory" ]; then
    while IFS= read -r file; do
      files+=("$directory/$file")
    done < <(find "$directory" -not -type d -name '*.conf' -printf '%P\n' | tr / '\1' | LC_ALL=C sort | tr '\1' /)
  fi
  [ "${#files[@]}" -gt 0 ] || return 0
  if ! jq --raw-output --null-input 'reduce inputs as $file ({}; . * ($file | {registerWithTaints} | select($file | has("registerWithTaints")) // {}))
    | .registerWithTaints // [] | map("\(.key)=\(.value // ""):\(.effect),") | join("")' "${files[@]}"; then
    echo "the taints of kubelet's configuration cannot be read as JSON from ${files[*]}" >&2
    return 1
  fi
}

# The flag is given once and outranks the configuration file, so the taints of both must be in it. Taints are given at
# registration only: kubelet may not add one to its own node later.
if [[ " $arguments " =~ ^(.*)\ --register-with-taints[=\ ]([^\ ]*)\ (.*)$ ]]; then
  before=${BASH_REMATCH[1]} taints=${BASH_REMATCH[2]}, after=${BASH_REMATCH[3]}
else
  before=" $arguments" taints=$(configured_taints) after=
fi
# The API server refuses a node that has a taint twice.
if [[ ",$taints" =~ [,\"]$key(=[^:]*)?:NoSchedule[,\"] ]]; then
  echo "gpu-validator did not pass this node: kubelet registers it with $key, as it was configured" >&2
  exit 0
fi
arguments="$before --register-with-taints=$taints$taint $after"
arguments=${arguments# }
arguments=${arguments% }

# systemd takes a backslash before these characters inside of quotes.
# shellcheck disable=SC2001 # four characters at once
quoted=$(sed 's/[\\"`$]/\\&/g' <<<"$arguments")
printf 'NODEADM_KUBELET_ARGS="%s"\n' "$quoted" >"$folder/environment"
echo "gpu-validator did not pass this node: kubelet registers it with $taint" >&2
