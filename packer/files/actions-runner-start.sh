#!/usr/bin/env bash
# Starts the runner with the configuration that systemd passes as a credential: not as an argument, which every user could read.
set -euo pipefail

ACTIONS_RUNNER_INPUT_JITCONFIG=$(<"${CREDENTIALS_DIRECTORY:?}/jit-configuration")
export ACTIONS_RUNNER_INPUT_JITCONFIG
exec /opt/actions-runner/run.sh
