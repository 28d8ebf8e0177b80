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
cd "${SLURM_SUBMIT_DIR:?is set by sbatch: submit this script with it, from the folder that contains slurm/}"
. slurm/job.sh

out=/dev/null  # verify writes nothing
for ((n = 1; n <= $#; n++)); do case ${!n} in --out) out=${*:n+1:1} ;; --out=*) out=${!n#--out=} ;; esac; done
begin "$out"
# Before the time limit, and when a rank dies, these stages are requeued and continue after their finished tasks; others start again.
requeued=
case $1 in
    vocab | vocap | encode | mix) resumes=1; trap 'signaled=1; if requeue "time limit"; then requeued=1; fi' USR1 ;;
    *) resumes=; trap 'signaled=1; echo "$1 does not continue in another try: if the time limit ends it, raise --time" >&2' USR1 ;;
esac
ranks --mpi="$XLME_MPI_TYPE" --kill-on-bad-exit=1 --wait=0 "${python[@]}" -m data_prep "$@" &
step=$!
while signaled= status=0; wait $step || status=$?; [ "$signaled" ]; do :; done  # a trap interrupts the wait
if [ $status != 0 ] && [ "$resumes" ] && [ -z "$requeued" ]; then end_of_try $status; fi
exit $status
