# Shared by all pretrain_*.sh: train, and continue in the next try of the same job as long as tries make progress.
# Needs XLME_RECIPE, XLME_DATA (several folders of phases with a colon between them) and XLME_OUT, XLME_BRANCH=RUN@STEP in
# place of the recipe. Arguments of the script go to xlme_ds.pretrain.
. slurm/job.sh

begin "$XLME_OUT"
# A lost node's lock on the run folder may outlive the node (on NFS for 90 s), and the job may restart sooner.
if [ -n "${SLURM_RESTART_COUNT:-}" ] && [ -d "$XLME_OUT" ]; then
    flock --timeout 600 "$XLME_OUT/.lock" true || true
fi

# The rows that prep.sh keeps out of training; XLME_HELDOUT= names none.
IFS=: read -ra data <<<"$XLME_DATA"
heldout=()
if [[ " $*" == *" --heldout"* ]]; then
    :  # an argument of the script decides
elif [ -n "${XLME_HELDOUT-}" ]; then
    heldout=(--heldout "$XLME_HELDOUT")
elif [ -z "${XLME_HELDOUT+set}" ] && [ -d "$(dirname "${data[0]}")/heldout" ]; then
    heldout=(--heldout "$(dirname "${data[0]}")/heldout")
fi

origin=(--recipe "$XLME_RECIPE")
if [ -n "${XLME_BRANCH:-}" ]; then origin=(--branch "$XLME_BRANCH"); fi

choose_port
# finished.json may be older than the run's last extension; a run that finishes writes it again.
marker() { stat -c '%i %y' "$XLME_OUT/finished.json" 2>/dev/null || true; }
ended=$(marker)
status=0
# A dead rank would leave the others waiting in a collective: srun ends them all.
# --wait=0: the first rank writes the report after the others have ended, for which some sites set a time limit.
ranks --kill-on-bad-exit=1 --wait=0 \
    "${python[@]}" -m xlme_ds.pretrain "${origin[@]}" --data "${data[@]}" --out "$XLME_OUT" \
    "${heldout[@]}" "$@" || status=$?

case " $* " in *" --dry-run "* | *" --dry_run "*) exit $status ;; esac  # no training was asked for
after=$(marker)
if [ -z "$after" ] || [ "$after" = "$ended" ]; then end_of_try $status; fi
exit $status
