#!/bin/bash
# Data preparation as jobs that wait for one another. Arguments go to every sbatch (--account, --partition, --nodes ...).
# Prints the number of the last job, so this trains as soon as the data are ready, and says so today:
#
#   sbatch --dependency=afterok:$(bash slurm/prep.sh) slurm/pretrain_base.sh
#
# A second call goes on after a failure; stages that are complete only say so.
set -euo pipefail

WORK=${WORK:-.}                                          # vocab/, encoded/ and mixed/ are made in it
TEXT=${TEXT:---mono mono --para para}                    # or: --corpus cc100 --where cc100=/data/cc100 ...
VOCAB=${VOCAB:---model sentencepiece.bpe.model}          # XLM-R's; or to train one: "$TEXT --size 250002"
MIX=${MIX:---row-tokens 512 --alpha 0.7 --mono-rows 256000000 --para-rows 256000000}

last=
submit() {  # submit SBATCH_OPTION... -- STAGE FLAG...
    local options=()
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
    last=$(sbatch --parsable --job-name="xlme-$1" --kill-on-invalid-dep=yes ${last:+--dependency=afterok:$last} \
        "${options[@]}" slurm/stage.sh "$@")
    last=${last%%;*}
    echo "job $last: $*" >&2
}

submit "$@" --nodes=1 -- vocab $VOCAB --out "$WORK/vocab"
submit "$@" -- encode $TEXT --vocab "$WORK/vocab" --out "$WORK/encoded"
submit "$@" -- mix --encoded "$WORK/encoded" --vocab "$WORK/vocab" --out "$WORK/mixed" $MIX
submit "$@" -- verify --data "$WORK/mixed"
echo "$last"
