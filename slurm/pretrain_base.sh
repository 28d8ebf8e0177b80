#!/bin/bash
# XLM-E Base on 64 GPUs: XLME_DATA=mixed XLME_OUT=runs/base sbatch slurm/pretrain_base.sh [--section.key value ...]
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
#SBATCH --kill-on-invalid-dep=yes  # as soon as the data cannot come any more
#SBATCH --output=%x-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?is set by sbatch: submit this script with it, from the folder that contains slurm/}"
XLME_RECIPE=${XLME_RECIPE:-base${XLME_ENGINE:+_$XLME_ENGINE}}
XLME_DATA=${XLME_DATA:-mixed}
XLME_OUT=${XLME_OUT:-runs/base}
. slurm/train.sh
