#!/usr/bin/env bash
# How much of the communication of data parallel training shows? Two ranks in two network namespaces, joined by a link
# held to 1 Gbit/s, train the 50M flavor with DDP, ZeRO-1 and ZeRO-3 in turn. First the bandwidth test: how long the
# bytes of a step take over that link alone. Where that is less than the ranks compute, it can hide; then at most 10 %
# of the step and 30 % of the communication may be exposed.
#
#   benchmarks/exposed_slow_link.sh [--program build/release/bin/phalanx] [--rate 1gbit] [--steps 8] [--rounds 1]
#                                   [options of phalanx train]
#
# Needs root (network namespaces, tc's tbf). Where that is not allowed it says so and ends with status 77 ("skipped").
# What it makes, it removes, also when it is interrupted.
set -euo pipefail

program=build/release/bin/phalanx
rate=1gbit
steps=8
rounds=1
# shellcheck source=scripts/options.bash
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/options.bash"
take_options program rate steps rounds -- "$@"

[[ $steps =~ ^[0-9]+$ && $steps -ge 3 ]] || { echo "$0: --steps $steps: expected 3 or more, as the first two are not counted" >&2; exit 2; }
[[ $rounds =~ ^[1-9][0-9]*$ ]] || { echo "$0: --rounds $rounds: expected 1 or more" >&2; exit 2; }
require_program "$program" --program
# shellcheck source=benchmarks/slow_link.bash
source "$(dirname "${BASH_SOURCE[0]}")/slow_link.bash"
make_slow_link "$rate"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"; clean_up' EXIT

both() {  # <arguments of phalanx...>
  local rank
  for rank in 0 1; do
    in_machine "$rank" RANK="$rank" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "$program" "$@" >"$scratch/log.$rank" 2>&1 &
    pids+=($!)
  done
  wait_for_all || { tail -n 20 "$scratch"/log.* >&2; return 1; }
}

echo "two ranks, a link of $rate between their network namespaces"
both bench comm --backends gloo --ops all_reduce,all_gather,reduce_scatter --sizes 32M --rounds 2 --copy 0 \
  --json "$scratch/link.json"
python3 -c "import random, struct; r = random.Random(1)
open('$scratch/tokens.bin', 'wb').write(struct.pack('<100000H', *(r.randrange(4096) for _ in range(100000))))"

for round in $(seq "$rounds"); do
  for layout in DDP ZeRO-1 ZeRO-3; do
    keys=(--parallelism.data_parallel_shard_degree=-1 --parallelism.zero_stage="${layout#ZeRO-}")
    [[ $layout != DDP ]] || keys=()
    : >"$scratch/run.toml"
    both train "$scratch/run.toml" --job.dump_folder="$scratch/$layout.$round" --model.flavor=50M \
      --training.dataset_path="$scratch/tokens.bin" --training.seq_len=256 --training.local_batch_size=8 \
      --training.steps="$steps" --lr_scheduler.warmup_steps=1 --checkpoint.enable=false \
      --metrics.enable_tensorboard=false --metrics.enable_report=false --comm.backend=gloo \
      ${keys[@]+"${keys[@]}"} ${rest[@]+"${rest[@]}"}
  done
done

python3 - "$scratch" "$rounds" <<'EOF'
import json, pathlib, statistics, sys

folder, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rows = {row["op"]: row["p50_us"] / row["bytes"] for row in json.loads((folder / "link.json").read_text())["rows"]}
verbs = {"DDP": ["all_reduce"], "ZeRO-1": ["reduce_scatter", "all_gather"],
         "ZeRO-3": ["all_gather", "all_gather", "reduce_scatter"]}
print("The link alone, microseconds per MB:", ", ".join("%s %.0f" % (op, 1e6 * us) for op, us in rows.items()))
print("| | step, ms | computing, ms | the link alone, ms | communication, ms | exposed, ms | of the step | of communication |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for layout, ops in verbs.items():
    columns = []
    for round in range(1, rounds + 1):
        run = folder / ("%s.%d" % (layout, round))
        parameters = json.loads((run / "run.json").read_text())["parameters"]
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2:]
        for s in steps:
            step, comm, exposed = s["seconds"], statistics.mean(s["comm_seconds"]), statistics.mean(s["exposed_seconds"])
            columns.append((step, step - exposed, comm, exposed, exposed / step, exposed / comm))
    step, computing, comm, exposed, of_step, of_comm = (statistics.median(column) for column in zip(*columns))
    link = 4 * parameters * sum(rows[op] for op in ops) * 1e-6
    print("| %s | %.0f | %.0f | %.0f | %.0f | %.0f | %.1f %% | %.0f %% |" % (
        layout, 1e3 * step, 1e3 * computing, 1e3 * link, 1e3 * comm, 1e3 * exposed, 100 * of_step, 100 * of_comm))
EOF
