#!/bin/bash
# One stage of data preparation over MPI, which prep.sh submits: sbatch slurm/stage.sh encode --mono mono ... --out encoded
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=32     # one rank a core
#SBATCH --cpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
. slurm/env.sh

# Before the limit these two are requeued, and go on behind the blocks that are finished; the others begin anew.
case $1 in encode | mix) trap 'scontrol requeue "$SLURM_JOB_ID"' USR1 ;; esac
srun --mpi="$MPI_TYPE" --kill-on-bad-exit=1 $PYTHON -m data_prep "$@" &
wait $!
