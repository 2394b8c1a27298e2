#!/usr/bin/env bash
# The launcher: what it tells each rank, on one node and on two, and what it does when a rank fails.
#
#   recipes/launcher.sh [PHALANX]          # build/release/bin/phalanx
#
# Its flags and the variables that it sets are torchrun's; docs/launch_options.md has all of them. The ranks here are a
# line of shell each, both nodes are this machine, and in the third run rank 1 fails once.
#
#   $ recipes/launcher.sh
#   phalanx launch --standalone --nproc-per-node 2
#   RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 node 0, restart 0 of 0
#   RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 node 0, restart 0 of 0
#   phalanx launch --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint 127.0.0.1:<port>
#   RANK=0 LOCAL_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 node 0, restart 0 of 0
#   RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 node 0, restart 0 of 0
#   RANK=2 LOCAL_RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 node 1, restart 0 of 0
#   RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 node 1, restart 0 of 0
#   phalanx launch --nproc-per-node 2 --max-restarts 1
#   RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 node 0, restart 0 of 1
#   RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 node 0, restart 1 of 1
#   RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 node 0, restart 0 of 1
#   RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 node 0, restart 1 of 1
set -euo pipefail
# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
if [[ ${1:-} == -* ]]; then take_only_options -- "$@"; fi
phalanx=${1:-build/release/bin/phalanx}
require_program "$phalanx" PHALANX
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Each rank writes its line into a file of its own: lines on one terminal come as they come.
tell='line="RANK=$RANK LOCAL_RANK=$LOCAL_RANK WORLD_SIZE=$WORLD_SIZE LOCAL_WORLD_SIZE=$LOCAL_WORLD_SIZE"
  echo "$line node $GROUP_RANK, restart $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS" \
    >"$0/$RANK.$TORCHELASTIC_RESTART_COUNT"'

# Prints the command, runs it on each node, and shows the ranks' lines.
run() {  # <nodes> <shell commands of a rank> <flags>
  local nodes=$1 rank=$2 jobs=() node status=0
  shift 2
  echo "phalanx launch $*"
  for ((node = 0; node < nodes; ++node)); do
    quietly "$folder/node.$node" "$phalanx" launch "$@" -- sh -c "$rank" "$folder" &
    jobs+=($!)
  done
  for node in "${jobs[@]}"; do wait "$node" || status=$?; done
  [[ $status == 0 ]] || exit "$status"
  cat "$folder"/[0-9].*
  rm "$folder"/[0-9].*
}

run 1 "$tell" --standalone --nproc-per-node 2

# A launcher takes a port that is free, and tells it its rank.
port=$("$phalanx" launch -n 1 -- sh -c 'echo "$MASTER_PORT"')
PHALANX_JOB_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # who knows it may join
export PHALANX_JOB_SECRET
run 2 "$tell" --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id 7 --rdzv-endpoint "127.0.0.1:$port"

# Rank 1 fails when rank 0 has written its line.
fail='
  if [ "$RANK$TORCHELASTIC_RESTART_COUNT" = 10 ]; then until [ -s "$0/0.0" ]; do sleep 0.01; done; exit 1; fi
  if [ "$RANK$TORCHELASTIC_RESTART_COUNT" = 00 ]; then sleep 60; fi'
run 1 "$tell$fail" --nproc-per-node 2 --max-restarts 1
