# The part that all pretrain_*.sh share: train, and go on in the next try of the same job as long as that gets on.
# Needs RECIPE, DATA and OUT; the words behind the script's name on the command line go to xlme_ds.pretrain.
set -euo pipefail
. slurm/env.sh

newest() { cat "$OUT/checkpoints/latest.json" 2>/dev/null || true; }

# A lost node's lock on the run folder may outlive it (on NFS for 90 s), and the job come back sooner.
if [ -n "${SLURM_RESTART_COUNT:-}" ] && [ -d "$OUT" ]; then
    flock --timeout 600 "$OUT/.lock" true || true
fi

before=$(newest)
status=0
# A dead rank would leave the others waiting in a collective: srun ends them all. Its exit code is the worst of them.
# --wait=0: the first rank writes the report when the others have left, which some sites allow only for a while.
srun --kill-on-bad-exit=1 --wait=0 \
    $PYTHON -m xlme_ds.pretrain --recipe "$RECIPE" --data "$DATA" --out "$OUT" "$@" || status=$?

if [ -e "$OUT/finished.json" ]; then exit 0; fi
# 0: stopped by a signal, and saved. 2: a mistake of the user's, told above. Else a fault, worth another try only if
# this one got further than the one before. A lost node is Slurm's business: it requeues the job by itself.
if [ $status = 0 ] || { [ $status != 2 ] && [ "$(newest)" != "$before" ]; }; then
    echo "$OUT: not finished (exit code $status), requeueing job $SLURM_JOB_ID"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
