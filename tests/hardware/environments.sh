#!/usr/bin/env bash
# Proves torch, JAX and CuPy on a machine with a GPU: makes one virtual environment for each, runs
# `gpu-validator environment` on them, and compares its verdicts with what must hold. Needs the Python Package Index, python3
# with venv, and jq.
#
#   tests/hardware/environments.sh VALIDATOR [FOLDER]
#
# Exits with 0 when every verdict is right. FOLDER keeps the environments and the reports (default: a temporary folder).
set -euo pipefail

validator=$(realpath "${1:?usage: environments.sh VALIDATOR [FOLDER]}")
folder=${2:-$(mktemp -d)}
mkdir -p "$folder"
failures=0

# Name, packages, checks that must pass.
prove() {
  local name=$1 packages=$2 checks=$3 check verdict
  local venv=$folder/$name report=$folder/$name.json
  if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv"
    # The list of packages is words on purpose.
    # shellcheck disable=SC2086
    "$venv/bin/python" -m pip install --quiet $packages
  fi
  "$validator" environment --json --python "$venv" >"$report" || true
  for check in $checks; do
    verdict=$(jq -r --arg check "$check" '.findings[] | select(.check == $check) | .verdict' "$report")
    echo "$name: $check: $verdict"
    if [ "$verdict" != pass ]; then
      jq --arg check "$check" '.findings[] | select(.check == $check)' "$report"
      failures=$((failures + 1))
    fi
  done
}

# GPU code as the file's headers have it, against what torch itself returns.
compare_architectures() {
  local venv=$folder/torch read told
  read=$(jq -r '[.environment.pythons[] | select(.named) | .packages[] | select(.name == "torch") | .device_code.value.machine_code
    | keys[]] | sort | join(" ")' "$folder/torch.json")
  told=$("$venv/bin/python" -c 'import torch; print(" ".join(sorted(torch.cuda.get_arch_list())))')
  echo "torch: read from the file: $read"
  echo "torch: get_arch_list():    $told"
  for architecture in $told; do
    case " $read " in
      *" $architecture "*) ;;
      *)
        echo "torch: $architecture was not read from the file"
        failures=$((failures + 1))
        ;;
    esac
  done
}

prove torch torch "python_environment torch_cuda torch_gemm library_resolution"
compare_architectures
prove jax "jax[cuda12]" "python_environment jax_cuda"
prove cupy "cupy-cuda12x[ctk] numpy" "python_environment cupy_cuda"

# A fault that must be found: an old cuDNN before the environment's own.
mkdir -p "$folder/shadow"
find "$folder/torch" -name 'libcudnn.so.9' -exec cp --dereference {} "$folder/shadow/" \;
LD_LIBRARY_PATH=$folder/shadow "$validator" environment --json --no-start --python "$folder/torch" >"$folder/shadow.json" || true
jq '.findings[] | select(.check == "library_resolution") | {verdict, summary}' "$folder/shadow.json"

echo "reports in $folder"
if [ "$failures" -gt 0 ]; then
  echo "$failures verdicts are not right"
  exit 1
fi
