# Shared by all jobs: their settings, and another try only as long as every try makes progress.
set -euo pipefail

# split NAME TEXT: the array NAME becomes the words of TEXT, quoted as for a shell: "--mono '/data/my corpus'".
split() {
    local lines
    lines=$(xargs -r printf '%s\n' <<< "$2") || { echo "close the quotes in: $2" >&2; exit 2; }
    if [ -n "$lines" ]; then mapfile -t "$1" <<< "$lines"; else mapfile -t "$1" < /dev/null; fi
}

# begin FOLDER: start a try whose output is FOLDER.
begin() {
    . slurm/env.sh
    split python "$XLME_PYTHON"
    folder=$1
    before=$(saved)
    # `requeue` does not count lost nodes and preemption: Slurm itself requeues after them.
    if [ "${SLURM_RESTART_COUNT:-0}" -gt "$XLME_REQUEUES" ]; then
        echo "$folder: requeued more often than XLME_REQUEUES=$XLME_REQUEUES: see above what ends the job, then submit it again" >&2
        exit 2
    fi
}

# A checksum of the folder's checkpoints, scores and finished tasks of data preparation: it changes when one is added.
saved() {
    { find -L "$folder" \( -name scores.json -o -name manifest.json -o -path '*/tasks/*.json' ! -name '*.begun.json' \) | sort
      find -L "$folder" -name latest.json -exec cat {} +; } 2>/dev/null | cksum || true
}

# requeue REASON: submit another try if this one saved something new; else print why not and return false.
requeue() {
    local job=$SLURM_JOB_ID
    if [ "$(saved)" = "$before" ]; then
        echo "$folder: not finished ($1), and this try saved nothing new, so the job is not requeued: see above what" \
            "ended it; if it was the time limit, raise --time" >&2
        return 1
    elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$XLME_REQUEUES" ]; then
        echo "$folder: not finished ($1), and requeued XLME_REQUEUES=$XLME_REQUEUES times: submit the job again to continue" >&2
        return 1
    fi
    [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    echo "$folder: not finished ($1), requeueing job $job"
    scontrol requeue "$job"  # last, because in a trap `return` without a number returns the status from before the trap
}

# ranks SRUN'S ARGUMENTS...: srun, with exit code 2 if a rank ended with 2. srun itself returns the highest code, which is that
# of the ranks it then kills, or 143.
ranks() {
    local - codes
    set +e
    { srun "$@" 2>&1 >&3 | mistake_reported; codes=("${PIPESTATUS[@]}"); } 3>&1
    return $((codes[0] && codes[1] ? 2 : codes[0]))
}

# Pass on srun's messages; return 1 if one reports that a rank ended with 2.
mistake_reported() {
    local line found=0
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%s\n' "$line" >&2
        case $line in srun:*"Exited with exit code 2") found=1 ;; esac
    done
    return $found
}

# end_of_try STATUS: end a try that left work to do; its exit code was STATUS, 0 after a signal.
end_of_try() {
    # 2: a user's mistake, reported above. Else a fault, worth another try only if this one got further than the one before.
    if [ "$1" != 2 ] && requeue "exit code $1"; then exit "$1"; fi
    exit $(($1 ? $1 : 2))
}

# The ranks meet at the job's first node, this one, at a port where nothing listens; after a requeue at another port.
choose_port() {
    local port=$((10000 + (10 * SLURM_JOB_ID + 1009 * ${SLURM_RESTART_COUNT:-0}) % 20000)) host
    host=$(uname -n)
    while (: < "/dev/tcp/localhost/$port" || : < "/dev/tcp/$host/$port") 2>/dev/null; do port=$((10000 + (port - 9999) % 20000)); done
    export MASTER_PORT=${MASTER_PORT:-$port}
}
