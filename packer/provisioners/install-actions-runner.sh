#!/usr/bin/env bash
# Installs the GitHub Actions runner under a user of its own, with hooks that look at the GPUs before and after each job.
# It is registered on each instance (config.sh), never in the image. UPLOADED_FOLDER, ACTIONS_RUNNER_VERSION and
# ACTIONS_RUNNER_SHA256 come from the template.
set -euo pipefail

: "${UPLOADED_FOLDER:?}" "${ACTIONS_RUNNER_VERSION:?}" "${ACTIONS_RUNNER_SHA256:?}"

files=$UPLOADED_FOLDER/files
folder=/opt/actions-runner
archive=/tmp/actions-runner.tar.gz

id runner >/dev/null 2>&1 || useradd --create-home --shell /bin/bash runner
curl --proto '=https' --fail --silent --show-error --location --output "$archive" \
  "https://github.com/actions/runner/releases/download/v$ACTIONS_RUNNER_VERSION/actions-runner-linux-x64-$ACTIONS_RUNNER_VERSION.tar.gz"
echo "$ACTIONS_RUNNER_SHA256  $archive" | sha256sum --check --quiet
install --directory --owner=runner --group=runner "$folder"
tar --extract --gzip --file "$archive" --directory "$folder" --no-same-owner
rm "$archive"
chown --recursive runner:runner "$folder"
# .NET's libraries, as the runner itself lists them.
"$folder/bin/installdependencies.sh"

hooks=$UPLOADED_FOLDER/hooks
install -D --mode=0755 --target-directory=/opt/gpu-bringup/hooks "$hooks/pre-job.sh" "$hooks/post-job.sh"
# Where the hooks keep what they know from one job to the next.
install --directory --owner=runner --mode=0755 /var/lib/gpu-validator
# The profile of the image is the hooks' too.
cat /etc/gpu-validator/environment - >"$folder/.env" <<EOF
ACTIONS_RUNNER_HOOK_JOB_STARTED=/opt/gpu-bringup/hooks/pre-job.sh
ACTIONS_RUNNER_HOOK_JOB_COMPLETED=/opt/gpu-bringup/hooks/post-job.sh
EOF
install -D --mode=0644 "$files/actions-runner.service" /etc/systemd/system/actions-runner.service
systemctl daemon-reload
systemctl enable actions-runner.service
