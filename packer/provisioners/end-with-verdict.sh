#!/usr/bin/env bash
# Ends with the exit code that run-validation.sh kept: anything but 0 ends the build, and no image is registered.
# REPORT_FOLDER comes from the template.
set -euo pipefail

: "${REPORT_FOLDER:?}"

exit_code=$(<"$REPORT_FOLDER/exit-code")
if [ "$exit_code" != 0 ]; then
  echo "gpu-validator ended with exit code $exit_code; no image is made, the reports say why" >&2
  [[ "$exit_code" =~ ^[1-9][0-9]{0,2}$ ]] || exit 1
  exit "$exit_code"
fi
# They are this instance's, and must not be found on the instances of the image.
rm --recursive "$REPORT_FOLDER"
