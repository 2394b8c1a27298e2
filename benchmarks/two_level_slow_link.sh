#!/usr/bin/env bash
# Collectives over two "machines": network namespaces with some ranks each, joined by a link held to 1 Gbit/s. Two
# levels (what `auto` finds: shared memory inside, gloo between) beside gloo between all ranks, in turns in one run.
#
#   benchmarks/two_level_slow_link.sh [--program build/release/bin/phalanx] [--rate 1gbit] [--ranks 2]
#                                     [options of phalanx bench comm]
#
# --ranks: of each machine. Needs root (network namespaces, tc's tbf). Where that is not allowed it says so and ends with
# status 77 ("skipped"). What it makes, it removes, also when it is interrupted.
set -euo pipefail

program=build/release/bin/phalanx
rate=1gbit
ranks=2
options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --program) program=$2; shift 2 ;;
    --rate) rate=$2; shift 2 ;;
    --ranks) ranks=$2; shift 2 ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) options+=("$1"); shift ;;
  esac
done

[[ -x $program ]] || { echo "$0: no program '$program'; build the target phalanx, or give --program" >&2; exit 2; }
# shellcheck source=benchmarks/slow_link.bash
source "$(dirname "${BASH_SOURCE[0]}")/slow_link.bash"
make_slow_link "$rate"
echo "2 machines x $ranks ranks, a link of $rate between their network namespaces"
for rank in $(seq 0 $((2 * ranks - 1))); do
  in_machine $((rank / ranks)) RANK="$rank" WORLD_SIZE=$((2 * ranks)) LOCAL_RANK=$((rank % ranks)) \
    LOCAL_WORLD_SIZE="$ranks" "$program" bench comm --backends auto,gloo ${options[@]+"${options[@]}"} &
  pids+=($!)
done
wait_for_all
