#!/bin/bash
# A training run on two nodes of eight GPUs each. One task a GPU; no launcher is needed: each task learns its rank from
# Slurm, the first node of the job is the meeting point, the port comes from the job's number.
#
#     sbatch recipes/slurm.sh --data tokens --out runs/gpt2-1.5b --size gpt2-1.5b --train.tokens 30000000000
#
#SBATCH --job-name=groundup
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# Ask for an end 120 s before the limit: the run then saves and exits with 75.
#SBATCH --signal=TERM@120
#SBATCH --requeue

set -u
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
# From 22.05 on srun no longer takes the number from the job.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

# --kill-on-bad-exit: when a rank dies, the others do not wait for it until parallel.timeout.
srun --kill-on-bad-exit=1 groundup train --resume "$@"
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
