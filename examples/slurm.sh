#!/bin/sh
# The program of all_reduce.py as a Slurm job: sbatch examples/slurm.sh
#SBATCH --job-name=all_reduce
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --time=5

# A secret takes PyNaCl (pip install 'pynccl-cffi[secure]'); without it leave its two lines out.
# Ranks meet on the job's first host, at a port that follows from the job's number. With a secret nobody else
# on the cluster can take part; srun hands it on with the environment.
PYNCCL_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export PYNCCL_SECRET

srun python examples/all_reduce.py "$@"
