#!/usr/bin/env bash
# Do asynchronous collectives overlap with computing? Two ranks in two network namespaces, joined by a link held to
# 1 Gbit/s; each computes matrix products that take as long as an all_reduce over that link (recipes/overlap.cc). One
# after the other they take twice as long as one; at the same time at most 1.25 times.
#
#   benchmarks/overlap_slow_link.sh [--program build/release/recipes/overlap] [--rate 1gbit] [--limit R]
#                                 [options of overlap]
#
# With --limit it fails if both at once take more than R times the longer one in three runs, one after the other: what a
# machine with noisy neighbours does to one measurement it does not do to three.
# Needs root (network namespaces, tc's tbf). Where that is not allowed it says so and ends with status 77 ("skipped").
# What it makes, it removes, also when it is interrupted.
set -euo pipefail

program=build/release/recipes/overlap
rate=1gbit
limit=
# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
take_options program rate limit -- "$@"

require_program "$program" --program
# shellcheck source=benchmarks/slow_link.bash
source "$(dirname "${BASH_SOURCE[0]}")/slow_link.bash"
make_slow_link "$rate"
echo "two ranks, a link of $rate between their network namespaces"
scratch=$(mktemp)
trap 'rm -f "$scratch"; clean_up' EXIT
for tries in 1 2 3; do
  for rank in 0 1; do
    in_machine "$rank" RANK="$rank" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 \
      "$program" --device cpu --backend gloo ${rest[@]+"${rest[@]}"} >"$scratch" &  # rank 0 alone prints
    pids+=($!)
  done
  wait_for_all
  cat "$scratch"
  # "both at once  12.34 ms  1.21 x the longer one, ..."
  ratio=$(awk '/^both at once/ { print $6 }' "$scratch")
  if [[ -z $limit ]] || awk -v ratio="$ratio" -v limit="$limit" 'BEGIN { exit !(ratio > 0 && ratio <= limit) }'; then exit 0; fi
done
echo "$0: both at once took more than $limit times the longer one, $tries times in a row" >&2
exit 1
