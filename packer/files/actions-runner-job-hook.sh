#!/bin/bash -p
# Runs the validator before and after a job as root, by sudo: its state, which includes the quarantine, is root's, and root may read the
# instance metadata. sudo passes on what the job is called and nothing that changes a verdict; files that a job names are not written.
set -euo pipefail

case "${1:-}" in
  pre-job | post-job) ;;
  *)
    echo "usage: $0 pre-job|post-job" >&2
    exit 3
    ;;
esac
# Its settings are in /etc/gpu-validator/hook.env and /etc/gpu-validator/environment, which only root can write.
exec /usr/bin/gpu-validator hook "$1"
