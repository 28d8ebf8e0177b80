#!/bin/bash
# Fine-tuning as a job array: a run for every task, training language and seed. This submits it; arguments go to sbatch.
#
#   MODEL=runs/base DATA=xtreme OUT=runs/base-xtreme bash slurm/finetune.sh [--account ...]
#   python -m xlme_ds.report xtreme --runs runs/base-xtreme --out tables          # when all are done
#
# A run that was cut off goes on, one that is finished only says so: call it again after a failure.
#SBATCH --job-name=xlme-finetune
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1      # one process a GPU; more must divide the batch
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.out
set -euo pipefail

MODEL=${MODEL:-runs/base}                                # a finished pre-training run, or an export
DATA=${DATA:-xtreme}                                     # folders with the tasks' files, in words
OUT=${OUT:-runs/xtreme}
TASKS=${TASKS:-pos ner xquad mlqa tydiqa xnli pawsx}
TRAIN=${TRAIN:-en}                                       # "en all": English only, and translate-train-all
SEEDS=${SEEDS:-1 2 3 4 5}
SETTINGS=${SETTINGS:-}                                   # for xlme_ds.finetune: --grid, --tuning.learning-rate 7e-6 ...

runs=()
for task in $TASKS; do for languages in $TRAIN; do for seed in $SEEDS; do runs+=("$task $languages $seed"); done; done; done

if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
    export MODEL DATA OUT TASKS TRAIN SEEDS SETTINGS
    exec sbatch --array="0-$((${#runs[@]} - 1))" "$@" slurm/finetune.sh
fi

cd "$SLURM_SUBMIT_DIR"
. slurm/env.sh
read -r task languages seed <<< "${runs[$SLURM_ARRAY_TASK_ID]}"
out=$OUT/$task-$languages/seed$seed
run=($PYTHON -m xlme_ds.finetune --task "$task" --model "$MODEL" --data $DATA --out "$out"
    --seeds "$seed" --tuning.train-languages "$languages" $SETTINGS)
srun --kill-on-bad-exit=1 --wait=0 "${run[@]}"
# Stopped by a signal and saved: the exit code is 0, and one of the runs (with --grid there are several) has no scores yet.
unfinished=$("${run[@]}" --list | while read -r folder; do [ -f "$folder/scores.json" ] || echo "$folder"; done)
if [ -n "$unfinished" ]; then
    echo "$out: not finished, requeueing"
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
