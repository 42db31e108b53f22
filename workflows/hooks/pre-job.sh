#!/usr/bin/env bash
# Before each job of a self-hosted runner: may its GPUs take the job? The runner starts this file by itself when its
# environment (the file .env in its folder) says ACTIONS_RUNNER_HOOK_JOB_STARTED=<this file>. No arguments reach a hook:
# every option of `gpu-validator hook pre-job` has a variable, which belongs into the same file.
set -euo pipefail

binary=$(command -v -- "${GPU_VALIDATOR_BINARY:-gpu-validator}") || {
  echo "::error title=infrastructure%3A GPU runner not fit for work::no gpu-validator on this runner's PATH, so nothing is known of its GPUs; install it, or set GPU_VALIDATOR_BINARY"
  exit 1
}
exec "$binary" hook pre-job
