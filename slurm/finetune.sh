#!/bin/bash
# Fine-tuning as a job array: a run for every task, training language and seed. This script submits it; arguments go to sbatch.
#
#   XLME_MODEL=runs/base XLME_DATA=xtreme XLME_OUT=runs/base-xtreme bash slurm/finetune.sh [--account ...]
#   xlme report xtreme --runs runs/base-xtreme --out tables                       # when all are done
#
# Call it again after a failure: interrupted runs continue, finished ones only report that they are.
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

XLME_MODEL=${XLME_MODEL:-runs/base}                      # a finished pre-training run, or an export
XLME_DATA=${XLME_DATA:-xtreme}                           # folders with the tasks' files, in words quoted as for a shell
XLME_OUT=${XLME_OUT:-runs/xtreme}
XLME_TASKS=${XLME_TASKS:-pos ner xquad mlqa tydiqa xnli pawsx}
XLME_TRAIN=${XLME_TRAIN:-en}                             # "en all": English only, and translate-train-all
XLME_SEEDS=${XLME_SEEDS:-1 2 3 4 5}
XLME_SETTINGS=${XLME_SETTINGS:-}                         # for xlme_ds.finetune: --grid, --tuning.learning-rate 7e-6 ...

runs=()
for task in $XLME_TASKS; do for languages in $XLME_TRAIN; do for seed in $XLME_SEEDS; do
    runs+=("$task $languages $seed")
done; done; done

if [ -z "${SLURM_ARRAY_TASK_ID:-}" ]; then
    export XLME_SUBMITTED=1 XLME_MODEL XLME_DATA XLME_OUT XLME_TASKS XLME_TRAIN XLME_SEEDS XLME_SETTINGS
    exec sbatch --array="0-$((${#runs[@]} - 1))" "$@" slurm/finetune.sh
fi

if [ -z "${XLME_SUBMITTED:-}" ]; then  # the defaults above would be trained
    echo "slurm/finetune.sh: the variables of its submission did not reach this job: submit it with bash, and without --export" >&2
    exit 2
fi
cd "${SLURM_SUBMIT_DIR:?is set by sbatch: submit this script with it, from the folder that contains slurm/}"
. slurm/job.sh
split data "$XLME_DATA"
split settings "$XLME_SETTINGS"
read -r task languages seed <<< "${runs[$SLURM_ARRAY_TASK_ID]}"
out=$XLME_OUT/$task-$languages/seed$seed
begin "$out"
choose_port
run=("${python[@]}" -m xlme_ds.finetune --task "$task" --model "$XLME_MODEL" --data "${data[@]}" --out "$out"
    --seeds "$seed" --tuning.train-languages "$languages" "${settings[@]}")
status=0
ranks --kill-on-bad-exit=1 --wait=0 "${run[@]}" || status=$?
# After a signal and a save the exit code is 0, and one of the runs (--grid has several) has no scores yet.
unfinished=$("${run[@]}" --list | while read -r folder; do [ -f "$folder/scores.json" ] || echo "$folder"; done)
if [ -n "$unfinished" ]; then end_of_try $status; fi
exit $status
