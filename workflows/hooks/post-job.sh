#!/usr/bin/env bash
# Behind each job of a self-hosted runner: ends what the job left on the runner's GPUs. The runner starts this file by
# itself when its environment (the file .env in its folder) says ACTIONS_RUNNER_HOOK_JOB_COMPLETED=<this file>.
set -euo pipefail

binary=$(command -v -- "${GPU_VALIDATOR_BINARY:-gpu-validator}") || {
  # The job's result is its own; the hook before the next job stops that one.
  echo "::warning title=GPUs after the job::no gpu-validator on this runner's PATH, so nothing was cleaned"
  exit 0
}
exec "$binary" hook post-job
