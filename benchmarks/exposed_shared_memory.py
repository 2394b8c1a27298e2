#!/usr/bin/env python3
"""How much of the communication of data parallel training shows where it goes through shared memory? Two ranks train
the 5M flavor with DDP, ZeRO-1 and ZeRO-3 in turn; over a slow link, benchmarks/exposed_slow_link.sh does the same.

    benchmarks/exposed_shared_memory.py [--program build/release/bin/phalanx] [--rounds 3] [--steps 14]

Prints the medians of all steps but each run's first three, means over the ranks. Communication includes waiting for the
other rank.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile

WARM_UP = 3  # the first steps of a run, which are not counted
SHARDED = "--parallelism.data_parallel_shard_degree=-1"
LAYOUTS = {"DDP": [], "ZeRO-1": [SHARDED, "--parallelism.zero_stage=1"],
           "ZeRO-3": [SHARDED, "--parallelism.zero_stage=3"]}


def train(program, folder, tokens, steps, keys):
    """The steps of one run, as metrics.jsonl has them, without the first ones."""
    config = folder.with_suffix(".toml")
    config.write_text("")
    values = {"job.dump_folder": folder, "model.flavor": "5M", "training.dataset_path": tokens, "training.seq_len": 256,
              "training.local_batch_size": 8, "training.steps": steps, "lr_scheduler.warmup_steps": 1,
              "checkpoint.enable": "false", "metrics.enable_tensorboard": "false", "metrics.enable_report": "false"}
    command = [program, "train", "-n", "2", config, *(f"--{key}={value}" for key, value in values.items()), *keys]
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                              env=dict(os.environ, OMP_NUM_THREADS="1"))
    except OSError as error:
        print(f"exposed_shared_memory: --program {program} cannot be started: {error.strerror}; build it: make, or "
              "name another", file=sys.stderr)
        sys.exit(2)
    if done.returncode != 0:
        sys.exit(f"exposed_shared_memory: {' '.join(map(str, command))} ended with status {done.returncode}:\n"
                 f"{done.stderr}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/release/bin/phalanx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: expected more than {WARM_UP}, as the first {WARM_UP} are not counted")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    steps = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as name:
        folder, numbers = pathlib.Path(name), random.Random(1)
        tokens = folder / "tokens.bin"
        tokens.write_bytes(struct.pack("<100000H", *(numbers.randrange(4096) for _ in range(100_000))))
        for number in range(options.rounds):
            for layout, keys in LAYOUTS.items():
                steps[layout] += train(options.program, folder / f"{layout}_{number}", tokens, options.steps, keys)

    print("| | step, ms | communication, ms | exposed, ms | of the step | of communication |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for layout, done in steps.items():
        rows = [(s["seconds"], statistics.mean(s["comm_seconds"]), statistics.mean(s["exposed_seconds"])) for s in done]
        step, communication, exposed = (statistics.median(column) for column in zip(*rows))
        print(f"| {layout} | {1e3 * step:.1f} | {1e3 * communication:.2f} | {1e3 * exposed:.2f} "
              f"| {100 * statistics.median(e / s for s, _, e in rows):.2f} % "
              f"| {100 * statistics.median(e / c for _, c, e in rows):.1f} % |")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
