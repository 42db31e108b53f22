#!/usr/bin/env bash
# Loads the driver and starts its services on a build instance that has a GPU, so that the image is validated as its
# instances will be. HAS_GPU and FABRIC_MANAGER (true or false) come from the template.
set -euo pipefail

: "${HAS_GPU:?}" "${FABRIC_MANAGER:?}"

if [ "$HAS_GPU" != true ]; then
  echo "this build instance has no GPU: the driver is not started"
  exit 0
fi

modprobe nvidia
modprobe nvidia_uvm
systemctl start nvidia-persistenced.service
if [ "$FABRIC_MANAGER" = true ]; then
  # Sizes with a single GPU (p5.4xlarge) have no switches; what the service makes of that is for the validation to judge.
  systemctl start nvidia-fabricmanager.service || systemctl --no-pager status nvidia-fabricmanager.service || true
fi
systemctl start nvidia-cdi-refresh.service
# The specification names this instance's GPUs; a list without any would only be found out by the first container.
devices=$(nvidia-ctk cdi list)
if [[ "$devices" != *nvidia.com/gpu=* ]]; then
  echo "the CDI specification names no GPU: ${devices:-it is empty}" >&2
  exit 1
fi
nvidia-smi
