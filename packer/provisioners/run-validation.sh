#!/usr/bin/env bash
# Validates the build instance with the image's own validator and profile. Ends well whatever the verdict: the reports are
# brought to the builder first, and end-with-verdict.sh ends the build afterwards. REPORT_FOLDER comes from the template.
set -euo pipefail

: "${REPORT_FOLDER:?}"

# Nothing that an earlier run left may be taken for this one's.
rm --recursive --force "$REPORT_FOLDER"
install --directory --mode=0755 "$REPORT_FOLDER"

set -a
# shellcheck source=/dev/null
. /etc/gpu-validator/environment
set +a

exit_code=0
gpu-validator run \
  --level standard \
  --forbid-simulated \
  --verbose \
  --junit "$REPORT_FOLDER/report.xml" \
  --json "$REPORT_FOLDER/report.json" || exit_code=$?
echo "$exit_code" >"$REPORT_FOLDER/exit-code"
