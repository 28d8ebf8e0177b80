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
. slurm/job.sh

out=/dev/null  # verify writes nothing
for ((n = 1; n <= $#; n++)); do case ${!n} in --out) out=${*:n+1:1} ;; --out=*) out=${!n#--out=} ;; esac; done
begin "$out"
# Before the limit, and when a rank dies, these are requeued, and go on after the tasks that are finished; the others begin anew.
requeued=
case $1 in
    vocab | vocap | encode | mix) goes_on=1; trap 'told=1; if requeue "time limit"; then requeued=1; fi' USR1 ;;
    *) goes_on=; trap 'told=1; echo "$1 does not go on in another try: if the time limit ends it, raise --time" >&2' USR1 ;;
esac
ranks --mpi="$XLME_MPI_TYPE" --kill-on-bad-exit=1 --wait=0 "${python[@]}" -m data_prep "$@" &
step=$!
while told= status=0; wait $step || status=$?; [ "$told" ]; do :; done  # a trap interrupts the wait
if [ $status != 0 ] && [ "$goes_on" ] && [ -z "$requeued" ]; then end_of_try $status; fi
exit $status
