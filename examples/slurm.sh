#!/bin/bash
#SBATCH --job-name=arb
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=arb-%j.log
#
# Train with one task for each GPU; every task sees all GPUs of its machine:
#
#   sbatch examples/slurm.sh --preset 1b --accum 16 --data book.txt
#
# Two minutes before the time limit the run saves and ends. A job that a signal ended, such as this
# one or that of a killed task, is requeued and resumes. So does one after `scontrol requeue`, and
# after the failure of a machine. The folder has to be on a disk that all machines share.

run=runs/slurm-$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

options=("$@" --out "$run")
if [ -e "$run/config.json" ]; then
    options=(--resume "$run")  # which records all options but this one
    while [ $# -gt 0 ]; do
        case $1 in --log) options+=("$1" "$2") ;; --log=*) options+=("$1") ;; esac
        shift
    done
fi

# the other tasks name a lost one, and end by themselves
srun --kill-on-bad-exit=0 \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec arb train "$@"' arb "${options[@]}"
code=$?
if [ $code -gt 128 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
