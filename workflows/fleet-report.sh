#!/usr/bin/env bash
# Judges the facts that scheduled-fleet.yml gathered, `NODES/node-NAME/facts.json`, in one table. A runner of $FLEET that
# left no facts (it was offline, or its job died) is a fault of the fleet too: silence is no pass.
#
#   FLEET='[{"name": "gpu-17", …}]' fleet-report.sh NODES FLEET.json
set -euo pipefail

nodes=$1
report=$2
validator=${GPU_VALIDATOR_BINARY:-}
if [ -z "$validator" ]; then
  cargo build --quiet --release --locked --package gpu-validator
  validator=target/release/gpu-validator
fi

facts=$(mktemp -d "${RUNNER_TEMP:-/tmp}/fleet.XXXXXX")
trap 'rm -rf -- "$facts"' EXIT
silent=0
while read -r name; do
  if [ -s "$nodes/node-$name/facts.json" ]; then
    cp -- "$nodes/node-$name/facts.json" "$facts/$name.json"
  else
    echo "::error title=fleet::$name left no facts: it was offline, or its job did not get through"
    silent=1
  fi
done < <(jq --raw-output '.[].name' <<<"$FLEET")

if [ -z "$(ls -A "$facts")" ]; then
  echo "::error title=fleet::no node of the fleet was validated"
  exit 2
fi
exit_code=0
table=$("$validator" judge "$facts" --json "$report") || exit_code=$?
echo "$table"
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
  {
    echo '## GPU fleet'
    echo
    # Four spaces make it code, whatever a node's texts hold.
    printf '%s\n' "$table" | sed 's/^/    /'
  } >>"$GITHUB_STEP_SUMMARY"
fi
if [ "$exit_code" -eq 0 ] && [ "$silent" -ne 0 ]; then
  exit_code=2
fi
exit "$exit_code"
