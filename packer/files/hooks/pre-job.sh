#!/usr/bin/env bash
# ACTIONS_RUNNER_HOOK_JOB_STARTED: a job does not begin on GPUs that are not well.
exec /usr/bin/gpu-validator hook pre-job
