#!/bin/bash
# The runner starts this after each job (ACTIONS_RUNNER_HOOK_JOB_COMPLETED in its .env).
exec /usr/bin/sudo --non-interactive /usr/libexec/gpu-bringup/actions-runner-job-hook.sh post-job
