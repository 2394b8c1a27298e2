# Sourced by the benchmarks over a slow link: two network namespaces, "machines", joined by a veth pair that tbf holds
# to a rate. Root's; where that is not allowed, the benchmark ends with status 77 ("skipped") and says why.
#
#   make_slow_link 1gbit
#   in_machine 0 NAME=value... program arguments... &     # and 1; the first is 10.99.0.1, where any port is free
#   pids+=($!)
#   wait_for_all                                          # the status of one that failed, else 0
#
# What it makes, it removes, and what is in `pids` it kills, also when the benchmark is interrupted.

readonly machines=("phx-$$-a" "phx-$$-b")
pids=()

skip() {
  echo "skipped: $1"
  exit 77
}

clean_up() {
  local pid name
  for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
  for name in "${machines[@]}"; do ip netns del "$name" 2>/dev/null || true; done
}

make_slow_link() {  # <rate>
  local tool name reason host=1
  [[ $(id -u) == 0 ]] || skip "network namespaces need root"
  for tool in ip tc; do command -v "$tool" >/dev/null || skip "no '$tool' here (package iproute2)"; done
  trap clean_up EXIT
  trap 'exit 130' INT TERM
  for name in "${machines[@]}"; do
    reason=$(ip netns add "$name" 2>&1) || skip "network namespaces cannot be made here: $reason"
  done
  reason=$(ip link add veth0 netns "${machines[0]}" type veth peer name veth0 netns "${machines[1]}" 2>&1) ||
    skip "no veth pair: $reason"
  for name in "${machines[@]}"; do
    ip -n "$name" addr add "10.99.0.$host/24" dev veth0
    ip -n "$name" link set lo up
    ip -n "$name" link set veth0 up
    reason=$(ip netns exec "$name" tc qdisc add dev veth0 root tbf rate "$1" burst 256kb latency 100ms 2>&1) ||
      skip "the link cannot be held to $1: $reason"
    host=$((host + 1))
  done
  PHALANX_JOB_SECRET=$(od -An -N 16 -t x1 /dev/urandom | tr -d ' \n')
  export PHALANX_JOB_SECRET
}

in_machine() {  # <0 or 1> <command, variables first>
  exec ip netns exec "${machines[$1]}" env MASTER_ADDR=10.99.0.1 MASTER_PORT=29400 OMP_NUM_THREADS=1 "${@:2}"
}

wait_for_all() {
  local status=0 pid
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  pids=()
  return $status
}
