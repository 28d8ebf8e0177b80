# The part that all pretrain_*.sh share: train, and go on in the next try of the same job as long as that gets on.
# Needs XLME_RECIPE, XLME_DATA (several folders of phases with a colon between them) and XLME_OUT, XLME_BRANCH=RUN@STEP in
# place of the recipe; the words after the script's name on the command line go to xlme_ds.pretrain.
. slurm/job.sh

begin "$XLME_OUT"
# A lost node's lock on the run folder may outlive it (on NFS for 90 s), and the job come back sooner.
if [ -n "${SLURM_RESTART_COUNT:-}" ] && [ -d "$XLME_OUT" ]; then
    flock --timeout 600 "$XLME_OUT/.lock" true || true
fi

# What prep.sh keeps out of training; XLME_HELDOUT= names none.
IFS=: read -ra data <<<"$XLME_DATA"
heldout=()
if [ -n "${XLME_HELDOUT-}" ]; then
    heldout=(--heldout "$XLME_HELDOUT")
elif [ -z "${XLME_HELDOUT+set}" ] && [ -d "$(dirname "${data[0]}")/heldout" ]; then
    heldout=(--heldout "$(dirname "${data[0]}")/heldout")
fi

origin=(--recipe "$XLME_RECIPE")
if [ -n "${XLME_BRANCH:-}" ]; then origin=(--branch "$XLME_BRANCH"); fi

choose_port
# What says that the run has finished may be from before it was made longer; a run that finishes writes it anew.
marker() { stat -c '%i %y' "$XLME_OUT/finished.json" 2>/dev/null || true; }
ended=$(marker)
status=0
# A dead rank would leave the others waiting in a collective: srun ends them all.
# --wait=0: the first rank writes the report when the others have left, which some sites allow only for a while.
ranks --kill-on-bad-exit=1 --wait=0 \
    "${python[@]}" -m xlme_ds.pretrain "${origin[@]}" --data "${data[@]}" --out "$XLME_OUT" \
    "${heldout[@]}" "$@" || status=$?

case " $* " in *" --dry-run "* | *" --dry_run "*) exit $status ;; esac  # nothing was to be trained
after=$(marker)
if [ -z "$after" ] || [ "$after" = "$ended" ]; then end_of_try $status; fi
exit $status
