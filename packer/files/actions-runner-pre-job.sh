#!/bin/bash
# The runner starts this before each job (ACTIONS_RUNNER_HOOK_JOB_STARTED in its .env).
exec /usr/bin/sudo --non-interactive /usr/libexec/gpu-bringup/actions-runner-job-hook.sh pre-job
