#!/bin/bash
# Slurm's Prolog: no job begins on GPUs that may not take work. The node is drained, and the job is requeued.
VALIDATOR_MAY_RESUME=no exec "${BASH_SOURCE[0]%/*}/health-check.sh"
