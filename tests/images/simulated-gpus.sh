#!/bin/bash
# Makes simulated GPUs and prints the environment in which programs see them, a variable a line. Arguments: the folder to make,
# and a node with its faults (NODE+FAULT…). The simulator's programs, library and catalogue lie beside this script.
set -euo pipefail

# Root's word that this machine's GPUs are simulated; without it a run on them is not a pass.
install -D --mode=0644 /dev/null /etc/gpu-validator/simulated-ok

simulator=$(dirname "$0")
IFS=+ read -ra names <<<"$2"
faults=()
for fault in "${names[@]:1}"; do
  faults+=(--fault "$fault")
done
"$simulator/gpu-simulator" --catalogue "$simulator" prepare --folder "$1" --library "$simulator/libsimulator.so" "${faults[@]}" "${names[0]}" |
  jq --raw-output '.environment | to_entries[] | "\(.key)=\(.value)"'
# An image's own environment refuses simulated GPUs.
echo GPU_VALIDATOR_FORBID_SIMULATED=false
