#!/usr/bin/env bash
# Waits until cloud-init has finished with this build instance: it configures the package manager's sources and runs apt itself.
set -euo pipefail

exit_code=0
cloud-init status --wait || exit_code=$?
case "$exit_code" in
  0) ;;
  # cloud-init 23.4 and later; Ubuntu's images have it, Amazon Linux's does not.
  2) echo "cloud-init finished with errors from which it recovered; the build continues" >&2 ;;
  *)
    echo "cloud-init failed with exit code $exit_code; /var/log/cloud-init.log has the reason" >&2
    exit 1
    ;;
esac
