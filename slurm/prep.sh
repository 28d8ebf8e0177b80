#!/bin/bash
# Data preparation as jobs that wait for one another. Arguments (--account, --partition, --nodes ...) go to every sbatch,
# --dependency to the first.
# It prints the number of the last job, so that training can be submitted now and start when the data are ready:
#
#   last=$(bash slurm/prep.sh) && sbatch --dependency=afterok:$last slurm/pretrain_base.sh
#
# Call it again after a failure: it continues, and complete stages only report that they are.
# XLME_TEXT, XLME_VOCAB and XLME_MIX are arguments quoted as for a shell: XLME_TEXT="--mono '/data/my corpus'".
set -euo pipefail
. slurm/job.sh

XLME_WORK=${XLME_WORK:-.}                                # vocab/, encoded/, mixed/ and heldout/ are made in it
XLME_TEXT=${XLME_TEXT:---mono mono --para para}          # or: --corpus cc100 --where cc100=/data/cc100 ...
XLME_VOCAB=${XLME_VOCAB:---model sentencepiece.bpe.model}  # XLM-R's; or to train one: "$XLME_TEXT --size 250002"
XLME_MIX=${XLME_MIX:---row-tokens 512 --alpha 0.7 --mono-rows 256000000 --para-rows 256000000}
XLME_HELDOUT_SHARE=${XLME_HELDOUT_SHARE-0.001}           # of documents and pairs, kept out of training; empty: none
XLME_HELDOUT_ROWS=${XLME_HELDOUT_ROWS:-512}              # of each task, every language the same share of them
split text "$XLME_TEXT"
split vocab "$XLME_VOCAB"
split mix "$XLME_MIX"
for n in "${!mix[@]}"; do case ${mix[n]} in  # --mono_rows is --mono-rows
    --*=*) name=${mix[n]%%=*} && mix[n]=${name//_/-}=${mix[n]#*=} ;;
    --*) mix[n]=${mix[n]//_/-} ;;
esac; done

options=()
first=  # what the first job waits for
while [ $# -gt 0 ]; do case $1 in
    --dependency=*) first=${1#*=} && shift ;;
    --dependency | -d) first=${2:?--dependency needs a value} && shift 2 ;;
    -d?*) first=${1#-d} && shift ;;
    *) options+=("$1") && shift ;;
esac; done

last=
submit() {  # submit SBATCH_OPTION... -- STAGE FLAG...
    local own=() wait=${last:+afterok:$last}
    wait=${wait:-$first}
    while [ "$1" != -- ]; do own+=("$1"); shift; done
    shift
    last=$(sbatch --parsable --job-name="xlme-$1" --kill-on-invalid-dep=yes ${wait:+--dependency="$wait"} \
        "${own[@]}" slurm/stage.sh "$@")
    last=${last%%;*}
    echo "job $last: $*" >&2
}

submit "${options[@]}" --nodes=1 -- vocab "${vocab[@]}" --out "$XLME_WORK/vocab"
prepare() {  # prepare ENCODED MIXED "ENCODE'S FLAGS" MIX'S FLAG...
    local encoded=$XLME_WORK/$1 mixed=$XLME_WORK/$2 part=$3
    shift 3
    # shellcheck disable=SC2086  # words without spaces inside
    submit "${options[@]}" -- encode "${text[@]}" --vocab "$XLME_WORK/vocab" --out "$encoded" $part
    submit "${options[@]}" -- mix --encoded "$encoded" --vocab "$XLME_WORK/vocab" --out "$mixed" "$@"
    submit "${options[@]}" -- verify --data "$mixed"
}

share=${XLME_HELDOUT_SHARE:+--heldout-share $XLME_HELDOUT_SHARE}
if [ -n "$share" ]; then
    few=() flag=  # every language the same share
    for word in "${mix[@]}"; do
        [[ $word != --* ]] || flag=${word%%=*}
        case $flag in --share | --max-repeats | --alpha) ;; *) few+=("$word") ;; esac
    done
    few+=(--alpha 0)
    for ((n = 0; n < ${#few[@]}; n++)); do case ${few[n]},${few[n + 1]-} in
        --mono-rows,0 | --para-rows,0 | --mono-rows=0,* | --para-rows=0,*) ;;  # no rows of this task
        --mono-rows,* | --para-rows,*) few[n + 1]=$XLME_HELDOUT_ROWS ;;
        --mono-rows=* | --para-rows=*) few[n]=${few[n]%%=*}=$XLME_HELDOUT_ROWS ;;
    esac; done
    prepare encoded_heldout heldout "--split heldout $share" "${few[@]}"
fi
prepare encoded mixed "${share:+--split train $share}" "${mix[@]}"
echo "$last"
