#!/bin/bash
# TSPO on four hosts of eight GPUs by Slurm. Each host gives the same command, and finds its place at the endpoint.
#   sbatch runs/hosts/slurm.sh [setting=value …]
# What `--params` and the settings name, and the run folder, must be seen by all hosts under the same paths.
#SBATCH --job-name=credit-rl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@900
# A quarter of an hour before its time is over (grace), and at SIGTERM, the run finishes its step and saves it.
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)   # rank 0 runs there
gpus=${SLURM_GPUS_ON_NODE:-8}
# where hosts have several networks, name the one that they reach each other by:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# restarts: ranks of which one died are started again from the last checkpoint.
# resume=true: a requeued job goes on from its last checkpoint, also on another number of hosts.
# corpus: localhost would be another host on each; here the search server runs on the first one.
code=0
srun --ntasks-per-node=1 --kill-on-bad-exit=0 \
    credit-rl train --params runs/params/tspo_qwen2.5_7b.yaml \
    hosts="$SLURM_NNODES" endpoint="$head:29500" ranks=$((SLURM_NNODES * gpus)) resume=true restarts=3 \
    run=runs/tspo_qwen2.5_7b_hosts corpus="http://$head:8000" "$@" || code=$?

# 138 and 143: it was told to end by USR1 or TERM, and saved; the same job goes on when there is room
if [ "$code" = 138 ] || [ "$code" = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
