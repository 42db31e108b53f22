#!/usr/bin/env bash
# Validates the build instance with the image's own validator and profile, at LEVEL (standard or image). Ends well whatever
# the verdict: the reports are brought to the builder first, and end-with-verdict.sh ends the build afterwards.
# REPORT_FOLDER, LEVEL and HAS_GPU come from the template.
set -euo pipefail

: "${REPORT_FOLDER:?}" "${LEVEL:?}" "${HAS_GPU:?}"

# The instance's type says whether there must be a GPU: one that is broken or missing is found by level standard.
if [ "$LEVEL" = standard ] && [ "$HAS_GPU" != true ]; then
  echo "this build instance has no GPU: level standard is for validate-ami, on an instance of the image"
  exit 0
fi

install --directory --mode=0755 "$REPORT_FOLDER"
# Nothing that an earlier run left may be taken for this one's.
rm --force "$REPORT_FOLDER/$LEVEL".*

set -a
# shellcheck source=/dev/null
. /etc/gpu-validator/environment
set +a

exit_code=0
gpu-validator run \
  --level "$LEVEL" \
  --verbose \
  --color never \
  --junit "$REPORT_FOLDER/$LEVEL.junit.xml" \
  --json "$REPORT_FOLDER/$LEVEL.json" \
  --facts "$REPORT_FOLDER/$LEVEL.facts.json" || exit_code=$?
echo "$exit_code" >"$REPORT_FOLDER/$LEVEL.exit-code"
# They are fetched by the build's own user.
chmod 0644 "$REPORT_FOLDER"/*
