#!/usr/bin/env bash
# Two processes on each of two hosts. JAX reads the environment of Open MPI up to 4; with a later one, or another MPI,
# install mpi4py and call autopar.distributed.initialize(cluster_detection_method="mpi4py").
set -euo pipefail

mpirun --host node0:2,node1:2 -np 4 --tag-output --bind-to core python -u train.py --steps 1000
