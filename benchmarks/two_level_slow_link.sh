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

skip() {
  echo "skipped: $1"
  exit 77
}
[[ -x $program ]] || { echo "$0: no program '$program'; build the target phalanx, or give --program" >&2; exit 2; }
[[ $(id -u) == 0 ]] || skip "network namespaces need root"
for tool in ip tc; do command -v "$tool" >/dev/null || skip "no '$tool' here (package iproute2)"; done

readonly machines=("phx-$$-a" "phx-$$-b")
pids=()
clean_up() {
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  for name in "${machines[@]}"; do ip netns del "$name" 2>/dev/null || true; done
}
trap clean_up EXIT
trap 'exit 130' INT TERM

for name in "${machines[@]}"; do
  reason=$(ip netns add "$name" 2>&1) || skip "network namespaces cannot be made here: $reason"
done
reason=$(ip link add veth0 netns "${machines[0]}" type veth peer name veth0 netns "${machines[1]}" 2>&1) ||
  skip "no veth pair: $reason"
host=1
for name in "${machines[@]}"; do
  ip -n "$name" addr add "10.99.0.$host/24" dev veth0
  ip -n "$name" link set lo up
  ip -n "$name" link set veth0 up
  reason=$(ip netns exec "$name" tc qdisc add dev veth0 root tbf rate "$rate" burst 256kb latency 100ms 2>&1) ||
    skip "the link cannot be held to $rate: $reason"
  host=$((host + 1))
done

PHALANX_JOB_SECRET=$(od -An -N 16 -t x1 /dev/urandom | tr -d ' \n')
export PHALANX_JOB_SECRET
echo "2 machines x $ranks ranks, a link of $rate between their network namespaces"
# Nothing else lives in the two namespaces, so any port is free.
for rank in $(seq 0 $((2 * ranks - 1))); do
  ip netns exec "${machines[$((rank / ranks))]}" env RANK="$rank" WORLD_SIZE=$((2 * ranks)) \
    LOCAL_RANK=$((rank % ranks)) LOCAL_WORLD_SIZE="$ranks" MASTER_ADDR=10.99.0.1 MASTER_PORT=29400 OMP_NUM_THREADS=1 \
    "$program" bench comm --backends auto,gloo ${options[@]+"${options[@]}"} &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
pids=()
exit $status
