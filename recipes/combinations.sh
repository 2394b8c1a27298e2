#!/usr/bin/env bash
# Two machines with a slow link between them, and two ways to use them: what talks most stays inside a machine.
#
#   recipes/combinations.sh [--build build/release] [--rate 1gbit] [--ranks 2]
#
# 1. sites: a pipeline inside each machine, data parallelism between them: gradients cross the link once a step.
# 2. llama_sharded_tensor_parallel: pairs of tensor-parallel ranks inside, sharded data parallelism between: what
#    crosses are parameters and gradients of each rank's part of the matrices.
#
# It prints (recipes/expected/combinations.txt has all lines):
#
#   $ recipes/combinations.sh
#   == a pipeline of 2 inside each machine, data parallelism over the link of 1gbit
#   ...
#   [phalanx] <date and time> - info - this node hosts the rendezvous of 2 nodes at 10.99.0.1:29400
#   ...
#   [phalanx] <date and time> - info - rank 0 of 4, from phalanx launch
#   [phalanx] <date and time> - info - security: <who may join>
#   [phalanx] <date and time> - info - device: cpu, backend: shm+gloo, 4 ranks, rendezvous at <address>, 1 thread a rank
#   DeviceMesh((dp_replicate=2, pp=2), device: 'cpu'): in a site 1F1B over shm, between sites gradients over gloo
#   iteration 1: loss 6.26769, 0.378 s
#   iteration 2: loss 6.25212, 0.305 s
#   iteration 3: loss 6.28397, 0.264 s
#   iteration 4: loss 6.28424, 0.300 s
#   iteration 5: loss 6.27725, 0.305 s
#   step 1: in sites 6.2676909, one rank 6.2676909
#   step 2: in sites 6.2521181, one rank 6.2521179
#   step 3: in sites 6.2839668, one rank 6.2839665
#   step 4: in sites 6.2842357, one rank 6.2842355
#   step 5: in sites 6.2772544, one rank 6.2772543
#   losses differ from one rank's by 4.7e-08 of them: the same
#   == tensor parallelism over pairs inside each machine, sharded data parallelism over the link of 1gbit
#   ...
#   [phalanx] <date and time> - info - this node hosts the rendezvous of 2 nodes at 10.99.0.1:29400
#   ...
#   [phalanx] <date and time> - info - rank 0 of 4, from phalanx launch
#   [phalanx] <date and time> - info - security: <who may join>
#   [phalanx] <date and time> - info - device: cpu, backend: shm+gloo, 4 ranks, rendezvous at <address>, 1 thread a rank
#   DeviceMesh((dp_shard=2, tp=2), device: 'cpu'): 18089216 parameters, 4522752 of them on rank 0
#   iteration  1: loss 10.4095, grad norm 3.2754, 156 tokens/s
#   iteration  2: loss 10.4288, grad norm 2.9452, 211 tokens/s
#   iteration  3: loss 10.4031, grad norm 2.3425, 219 tokens/s
#   Tensor- and data-parallel training is done.
#
# The machines are network namespaces, the link is held to the rate by tc's tbf; each has a
# `phalanx launch` with so many ranks. Needs root; where that is not allowed it says so and ends with
# status 77 ("skipped"). It removes what it makes.
set -euo pipefail

build=build/release
rate=1gbit
ranks=2
# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
take_only_options build rate ranks -- "$@"
for program in bin/phalanx recipes/sites recipes/llama_sharded_tensor_parallel; do
  require_program "$build/$program" --build
done
# shellcheck source=benchmarks/slow_link.bash
source "$(dirname "${BASH_SOURCE[0]}")/../benchmarks/slow_link.bash"
make_slow_link "$rate"

on_both() {  # <program> <arguments>
  local machine
  for machine in 0 1; do
    in_machine "$machine" "$build/bin/phalanx" launch --nnodes 2 --node-rank "$machine" --nproc-per-node "$ranks" \
      --rdzv-endpoint 10.99.0.1:29400 -- "$@" &
    pids+=($!)
  done
  wait_for_all
}

echo "== a pipeline of $ranks inside each machine, data parallelism over the link of $rate"
on_both "$build/recipes/sites"
echo "== tensor parallelism over pairs inside each machine, sharded data parallelism over the link of $rate"
on_both "$build/recipes/llama_sharded_tensor_parallel" --batch 2 --seq 64 --iterations 3
