# What differs between sites. Every script here reads this file first; each setting can also be set for one submission,
# since sbatch passes on the environment: PYTHON=/opt/xlme/bin/python sbatch slurm/pretrain_base.sh

# Modules and the Python environment (README, "Environment"), or a container: PYTHON is what srun starts on every node.
# module load cuda/12.8 nccl
# PYTHON="apptainer exec --nv xlme_ds.sif python"
PYTHON=${PYTHON:-python}

# How srun joins the ranks of data preparation: pmi2 for MPICH and the mpich wheel, pmix for Open MPI.
MPI_TYPE=${MPI_TYPE:-pmi2}

# Fabric: the interface for connections, and the InfiniBand adapters. NCCL_DEBUG=INFO tells what it chose.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5

# Threads of each process, and SRUN_CPUS_PER_TASK because srun does not take over sbatch's --cpus-per-task by itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
export PYTHONUNBUFFERED=1
