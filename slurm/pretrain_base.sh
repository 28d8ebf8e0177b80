#!/bin/bash
# XLM-E Base on 64 GPUs: DATA=mixed OUT=runs/base sbatch slurm/pretrain_base.sh [--section.key value ...]
#SBATCH --job-name=xlme-base
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8      # one process a GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --mem=0                  # all of the node's
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600        # seconds before the limit: time for one step and a checkpoint; then the job is requeued
#SBATCH --requeue                # after the loss of a node
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
cd "$SLURM_SUBMIT_DIR"
RECIPE=${RECIPE:-base_zero1}
DATA=${DATA:-mixed}
OUT=${OUT:-runs/base}
. slurm/train.sh
