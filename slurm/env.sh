# Settings of a site. Every job reads this file first; each setting can also be set for one submission, since sbatch
# passes on the environment: XLME_PYTHON=/opt/xlme/bin/python sbatch slurm/pretrain_base.sh
# Variables of these scripts begin with XLME_, because many centres use WORK, DATA, SCRATCH and the like.

# Modules and the Python environment (docs/howto/gpus.md), or a container: XLME_PYTHON is what srun starts on every node.
# module load cuda/12.8 nccl
# XLME_PYTHON="apptainer exec --nv xlme_ds.sif python"
XLME_PYTHON=${XLME_PYTHON:-python}

# How srun joins the ranks of data preparation: pmi2 for MPICH and the mpich wheel, pmix for Open MPI.
XLME_MPI_TYPE=${XLME_MPI_TYPE:-pmi2}

# Most requeues of a job. Each try must have saved something new; the limit ends a job that loses a node at every start.
XLME_REQUEUES=${XLME_REQUEUES:-100}

# Fabric: the interface for connections, and the InfiniBand adapters. NCCL_DEBUG=INFO prints the choice.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5

# Threads of each process, and SRUN_CPUS_PER_TASK, because srun does not take sbatch's --cpus-per-task by itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export PYTHONUNBUFFERED=1

# Compilers' caches go to the node's own disk, into a private folder of the job that xlme_ds makes: on a shared file system every
# process would look up and lock thousands of small files, and in a home folder they could exceed a quota.
# TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and NUMBA_CACHE_DIR name other folders.
export XLME_CACHE=${XLME_CACHE:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/xlme-$(id -u)-${SLURM_JOB_ID:-0}}
