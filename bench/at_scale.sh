#!/bin/bash
# Does XLM-E pay at the size of ELECTRA-Small? XLM-E and XLM-R + TLM for equal operations on one GPU, 12 layers of 256, with
# fine-tuned entities and parts of speech at the end.
#
#   bash bench/at_scale.sh TEXT EVAL OUT [MINUTES [OPTIONS OF xlme compare]]
#
# TEXT has mono/<lang>.txt.xz and para/en-<lang>.txt.zip, EVAL panx/ and udpos/. Text is encoded once. Call it again with the same
# OUT until it prints the tables: training and tests stop after MINUTES (9) with exit code 75, and go on exactly where they were. The variables
# below change its size; options go to the comparison, with absolute paths. Each system has the settings that were better in our small
# runs (docs/results/comparison.md); options with --own replace them.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '5,10p' "$0" >&2; exit 2; }
TEXT=$(realpath "$1") EVAL=$(realpath "$2") OUT=$(realpath -m "$3") MINUTES=${4:-9}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
RECIPES=${RECIPES:-xlme xlmr_tlm} BUDGETS=${BUDGETS:-1e16 1e17} SEEDS=${SEEDS:-2 1} TUNING_SEEDS=${TUNING_SEEDS:-3}
VOCABULARY=${VOCABULARY:-16384} ROWS=${ROWS:-256} MICRO=${MICRO:-128}
# In 1e17 operations XLM-R + TLM reads 5.7 million rows of each task, more than XLM-E: each row nine times, with new masks.
TRAIN_ROWS=${TRAIN_ROWS:-600000} HELDOUT_ROWS=${HELDOUT_ROWS:-1024} HELDOUT_SHARE=${HELDOUT_SHARE:-0.01}
PROCESSES=${PROCESSES:-$(nproc)}
# ELECTRA-Small's shape. The generator has a quarter of the layers, because its width is the discriminator's.
MODEL=${MODEL:---model.width 256 --model.heads 4 --model.feed-forward 1024 --model.discriminator-layers 12 --model.generator-layers 3}
WARMUP=${WARMUP:-1000} LOG=${LOG:-100}
own=()
for settings in "xlme: --objective.generator-keep-fraction 0.15" "xlmr_tlm: --objective.mask-fraction 0.3"; do
  if [[ " ${RECIPES//+/ } " == *" ${settings%%:*} "* && " ${*:5}" != *" --own"* ]]; then own+=("$settings"); fi
done

prep() { "$PYTHON" -m data_prep "$@" >>"$OUT/prep.log" 2>&1 || { tail -3 "$OUT/prep.log" >&2; exit 1; }; }
text=(--mono "$TEXT/mono" --para "$TEXT/para")
mkdir -p "$OUT"
prep vocab "${text[@]}" --size "$VOCABULARY" --sentences 500000 --out "$OUT/vocab" --processes "$PROCESSES"
for part in train heldout; do
  prep encode "${text[@]}" --vocab "$OUT/vocab" --out "$OUT/encoded/$part" --split $part --heldout-share "$HELDOUT_SHARE" \
    --max-pair-tokens 125 --processes "$PROCESSES"
done
prep mix --encoded "$OUT/encoded/train" --vocab "$OUT/vocab" --out "$OUT/train" --row-tokens 128 \
  --mono-rows "$TRAIN_ROWS" --para-rows "$TRAIN_ROWS"
prep mix --encoded "$OUT/encoded/heldout" --vocab "$OUT/vocab" --out "$OUT/heldout" --row-tokens 128 --alpha 0.3 \
  --mono-rows "$HELDOUT_ROWS" --para-rows "$HELDOUT_ROWS"

# shellcheck disable=SC2086
timeout --foreground --signal=TERM "${MINUTES}m" "$PYTHON" -m xlme_ds compare --recipes $RECIPES --budgets $BUDGETS --seeds $SEEDS \
  --data "$OUT/train" --heldout "$OUT/heldout" --out "$OUT/compare" --rows "$ROWS" --ner "$EVAL/panx" --pos "$EVAL/udpos" \
  --tuning-seeds "$TUNING_SEEDS" --tuning="${TUNING:---tuning.learning-rate 3e-4 --tuning.batch 32 --tuning.epochs 3}" \
  ${own:+--own "${own[@]}"} "${@:5}" -- $MODEL --model.vocabulary "$VOCABULARY" --model.max-positions 128 --model.embedding-sharing gdes --model.relative-bias gated \
  --model.init-std 0.02 --data.micro-batch "$MICRO" --optimizer.learning-rate 5e-4 --optimizer.warmup-steps "$WARMUP" \
  --train.log-every "$LOG" --train.eval-every 0 ${SETTINGS:-} || {
  code=$?
  case $code in
    124|143) echo "stopped after $MINUTES minutes: call it again with the same OUT"; exit 75 ;;
    *) exit $code ;;
  esac
}
