#!/bin/bash
# Slurm's Epilog: no further job starts on GPUs that may not take work after a job.
VALIDATOR_MAY_RESUME=no exec "${BASH_SOURCE[0]%/*}/health-check.sh"
