#!/usr/bin/env bash
# Two machines with a slow link between them, and two ways to use them: what talks most stays inside a machine.
#
#   recipes/combinations.sh [--build build/release] [--rate 1gbit] [--ranks 2]
#
# 1. sites: a pipeline inside each machine, data parallelism between them: gradients cross the link once a step.
# 2. llama_sharded_tensor_parallel: pairs of tensor-parallel ranks inside, sharded data parallelism between: what crosses are
#    parameters and gradients of each rank's part of the matrices.
#
#   $ recipes/combinations.sh
#   ...
#   losses differ from one rank's by 1.1e-07: the same
#   ...
#   Tensor- and data-parallel training is done.
#
# The machines are network namespaces, the link is held to the rate by tc's tbf; each has a `phalanx launch` with so many
# ranks. Needs root; where that is not allowed it says so and ends with status 77 ("skipped"). It removes what it makes.
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
