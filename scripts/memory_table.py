#!/usr/bin/env python3
"""Trains a small Llama for a few steps under each layout, and prints what the fullest rank took beside what was predicted:
the tables of docs/memory.md.

    scripts/memory_table.py [--program build/release/bin/phalanx] [--ranks 4] [-- --model.flavor 50M ...]
"""
import argparse
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

SHARDED = "--parallelism.data_parallel_shard_degree="
CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "buffers"]


def layouts(ranks):
    all_ranks = SHARDED + "-1"
    yield "data parallel", []
    yield "ZeRO-1", [all_ranks, "--parallelism.zero_stage=1"]
    yield "ZeRO-2", [all_ranks, "--parallelism.zero_stage=2"]
    yield "ZeRO-3", [all_ranks]
    yield "ZeRO-3, kept gathered", [all_ranks, "--parallelism.fsdp_reshard_after_forward=never"]
    yield "ZeRO-3, recomputing", [all_ranks, "--activation_checkpoint.mode=full"]
    yield "ZeRO-3, 2 accumulated", [all_ranks, "--training.global_batch_size=%d" % (2 * ranks * 4)]
    if ranks % 2 == 0 and ranks > 2:
        yield "ZeRO-3 over %d, 2 copies" % (ranks // 2), [SHARDED + str(ranks // 2)]


CONFIG = """
[job]
dump_folder = "{folder}/run"
[model]
flavor = "5M"
[training]
dataset_path = "{folder}/tokens.bin"
seq_len = 128
local_batch_size = 4
steps = 3
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = false
[metrics]
enable_tensorboard = false
enable_report = false
"""


def mib(count):
    return "%.1f" % (count / 2**20)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default="build/release/bin/phalanx")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("more", nargs="*", help="configuration keys for every run, after --")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        tokens = random.Random(1)
        ids = [tokens.randrange(4096) for _ in range(100_000)]
        pathlib.Path(folder, "tokens.bin").write_bytes(struct.pack("<%dH" % len(ids), *ids))
        config = pathlib.Path(folder, "run.toml")
        config.write_text(CONFIG.format(folder=folder))
        print("| layout | " + " | ".join(CATEGORIES) + " | peak, counted | predicted | PSS |")
        print("| --- |" + " --- |" * (len(CATEGORIES) + 3))
        for name, keys in layouts(options.ranks):
            run = subprocess.run(
                [options.program, "train", "-n", str(options.ranks), str(config), *keys, *options.more],
                capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
            if run.returncode != 0:
                sys.exit("memory_table: %s failed:\n%s" % (name, run.stderr))
            memory = json.loads(pathlib.Path(folder, "run", "run.json").read_text())["memory"]
            fullest = max(memory["measured"], key=lambda rank: rank["total"])
            predicted = memory["predicted"]
            pairs = ["%s / %s" % (mib(fullest[c]), mib(predicted[c])) for c in CATEGORIES]
            difference = 100 * (predicted["total"] / fullest["total"] - 1)
            print("| %s | %s | %s | %s (%+.1f %%) | %s |" % (name, " | ".join(pairs), mib(fullest["total"]),
                                                            mib(predicted["total"]), difference, mib(fullest["pss"])),
                  flush=True)


if __name__ == "__main__":
    main()
