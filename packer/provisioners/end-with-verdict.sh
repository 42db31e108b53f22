#!/usr/bin/env bash
# Ends with the exit codes that run-validation.sh kept: anything but 0 ends the build, and no image is registered.
# REPORT_FOLDER and HAS_GPU come from the template.
set -euo pipefail

: "${REPORT_FOLDER:?}" "${HAS_GPU:?}"

levels=(image)
if [ "$HAS_GPU" = true ]; then
  levels=(standard image)
fi
for level in "${levels[@]}"; do
  # A level whose code is missing was not validated, which ends the build as well.
  exit_code=$(<"$REPORT_FOLDER/$level.exit-code")
  if [ "$exit_code" != 0 ]; then
    echo "gpu-validator ended level $level with exit code $exit_code; no image is made, the reports say why" >&2
    [[ "$exit_code" =~ ^[1-9][0-9]{0,2}$ ]] || exit 1
    exit "$exit_code"
  fi
done
# They are this instance's, and must not be found on the instances of the image.
rm --recursive "$REPORT_FOLDER"
