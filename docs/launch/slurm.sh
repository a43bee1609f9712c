#!/usr/bin/env bash
# A process for each GPU of four hosts; JAX finds the first process, the count and the rank in Slurm's environment.
# Send it off with: sbatch docs/launch/slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --output=train-%j.log
set -euo pipefail

# --label: output of all processes with their rank. --kill-on-bad-exit: when one fails, the others are ended.
srun --label --kill-on-bad-exit=1 python -u train.py --steps 1000
