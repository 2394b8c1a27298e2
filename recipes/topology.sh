#!/usr/bin/env bash
# What a machine has, how its devices are linked, and the measured speed of each level, from the nearest cache to TCP.
#
#   recipes/topology.sh [PHALANX]          # build/release/bin/phalanx
#
# In < > stands what differs from machine to machine. "..." stands for lines that not every machine has: the processor's
# name, caches, NUMA nodes and network devices, and where there are GPUs their links and copies. All lines that there
# can be are in recipes/expected/topology.txt.
#
#   $ recipes/topology.sh
#   Processors
#   ...
#     <1 socket>, <2 cores>, <1 hardware thread> each: <2 CPUs>
#   ...
#   NUMA nodes
#   ...
#   Network
#   ...
#   This process
#     may use <2> of <2 CPUs>
#   GPUs
#   ...
#   Measured: copies by memcpy, each byte counted once
#     level            buffer      one CPU        all <2>
#   ...
#     memory     <64.0 MiB>   <2.79 GB/s>    <4.88 GB/s>
#   ...
#   Measured: between two processes
#     link                           speed      latency
#     shared memory             <4.10 GB/s>    <0.30 us>
#     loopback TCP              <1.90 GB/s>    <9.10 us>
#   ...
#   Between nodes: phalanx bench comm --ops pingpong,sendrecv, in a job with ranks on each of them
set -euo pipefail
# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
if [[ ${1:-} == -* ]]; then take_only_options -- "$@"; fi
phalanx=${1:-build/release/bin/phalanx}
require_program "$phalanx" PHALANX
exec "$phalanx" doctor --topology
