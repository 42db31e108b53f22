#!/usr/bin/env bash
# ACTIONS_RUNNER_HOOK_JOB_COMPLETED: what a job left on its GPUs is ended, and noted against it.
exec /usr/bin/gpu-validator hook post-job
