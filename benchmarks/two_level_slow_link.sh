#!/usr/bin/env bash
# Collectives over two "machines": network namespaces with some ranks each, joined by a link held to 1 Gbit/s. Two
# levels (what `auto` finds: shared memory inside, gloo between) beside gloo between all ranks, in turns in one run.
#
#   benchmarks/two_level_slow_link.sh [--program build/release/bin/phalanx] [--rate 1gbit] [--ranks 2]
#                                     [options of phalanx bench comm]
#
# --ranks: of each machine. Needs root (network namespaces, tc's tbf). Where that is not allowed it says so and ends
# with status 77 ("skipped"). What it makes, it removes, also when it is interrupted.
set -euo pipefail

program=build/release/bin/phalanx
rate=1gbit
ranks=2
# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
take_options program rate ranks -- "$@"

require_program "$program" --program
# shellcheck source=benchmarks/slow_link.bash
source "$(dirname "${BASH_SOURCE[0]}")/slow_link.bash"
make_slow_link "$rate"
echo "2 machines x $ranks ranks, a link of $rate between their network namespaces"
for rank in $(seq 0 $((2 * ranks - 1))); do
  in_machine $((rank / ranks)) RANK="$rank" WORLD_SIZE=$((2 * ranks)) LOCAL_RANK=$((rank % ranks)) \
    LOCAL_WORLD_SIZE="$ranks" "$program" bench comm --backends auto,gloo ${rest[@]+"${rest[@]}"} &
  pids+=($!)
done
wait_for_all
