#!/usr/bin/env bash
# Do asynchronous collectives overlap with computing? Two ranks in two network namespaces, joined by a link held to
# 1 Gbit/s; each computes matrix products that take as long as an all_reduce over that link (recipes/overlap.cc). One
# after the other they take twice as long as one; at the same time at most 1.25 times.
#
#   benchmarks/overlap_slow_link.sh [--program build/release/recipes/overlap] [--rate 1gbit] [options of overlap]
#
# Needs root (network namespaces, tc's tbf). Where that is not allowed it says so and ends with status 77 ("skipped").
# What it makes, it removes, also when it is interrupted.
set -euo pipefail

program=build/release/recipes/overlap
rate=1gbit
options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --program) program=$2; shift 2 ;;
    --rate) rate=$2; shift 2 ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) options+=("$1"); shift ;;
  esac
done

skip() {
  echo "skipped: $1"
  exit 77
}
[[ -x $program ]] || { echo "$0: no program '$program'; build the target overlap, or give --program" >&2; exit 2; }
[[ $(id -u) == 0 ]] || skip "network namespaces need root"
for tool in ip tc; do command -v "$tool" >/dev/null || skip "no '$tool' here (package iproute2)"; done

readonly a=phx-$$-a b=phx-$$-b
pids=()
clean_up() {
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
}
trap clean_up EXIT
trap 'exit 130' INT TERM

reason=$(ip netns add "$a" 2>&1 && ip netns add "$b" 2>&1) || skip "network namespaces cannot be made here: $reason"
reason=$(ip link add veth0 netns "$a" type veth peer name veth0 netns "$b" 2>&1) || skip "no veth pair: $reason"
host=1
for name in "$a" "$b"; do
  ip -n "$name" addr add "10.99.0.$host/24" dev veth0
  ip -n "$name" link set lo up
  ip -n "$name" link set veth0 up
  reason=$(ip netns exec "$name" tc qdisc add dev veth0 root tbf rate "$rate" burst 256kb latency 100ms 2>&1) ||
    skip "the link cannot be held to $rate: $reason"
  host=$((host + 1))
done

PHALANX_JOB_SECRET=$(od -An -N 16 -t x1 /dev/urandom | tr -d ' \n')
export PHALANX_JOB_SECRET
# Nothing else lives in the two namespaces, so any port is free.
start() {  # <namespace> <rank>
  ip netns exec "$1" env RANK="$2" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.99.0.1 \
    MASTER_PORT=29400 OMP_NUM_THREADS=1 "$program" --backend gloo ${options[@]+"${options[@]}"} &
  pids+=($!)
}
echo "two ranks, a link of $rate between their network namespaces"
start "$a" 0
start "$b" 1
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
pids=()
exit $status
