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
    all_ranks, recompute = SHARDED + "-1", "--activation_checkpoint.mode=full"
    tensor, pipeline = "--parallelism.tensor_parallel_degree=%d", "--parallelism.pipeline_parallel_degree=%d"
    schedule = "--parallelism.pipeline_parallel_schedule="
    yield "data parallel", []
    yield "data parallel, recomputing", [recompute]
    yield "ZeRO-1", [all_ranks, "--parallelism.zero_stage=1"]
    yield "ZeRO-2", [all_ranks, "--parallelism.zero_stage=2"]
    yield "ZeRO-3", [all_ranks]
    yield "ZeRO-3, kept gathered", [all_ranks, "--parallelism.fsdp_reshard_after_forward=never"]
    yield "ZeRO-3, recomputing", [all_ranks, recompute]
    yield "ZeRO-3, 2 accumulated", [all_ranks, "--training.global_batch_size=%d" % (2 * ranks * 4)]
    yield "tensor", [tensor % ranks]
    yield "pipeline, 1F1B", [pipeline % ranks, "--training.global_batch_size=%d" % (2 * ranks)]
    if ranks % 2 == 0 and ranks > 2:
        half = ranks // 2
        yield "ZeRO-3 over %d, 2 copies" % half, [SHARDED + str(half)]
        yield "tensor 2, data parallel", [tensor % 2]
        yield "tensor 2, ZeRO-1", [tensor % 2, all_ranks, "--parallelism.zero_stage=1"]
        yield "tensor 2, ZeRO-3", [tensor % 2, all_ranks]
        yield "tensor 2, ZeRO-3, recomputing", [tensor % 2, all_ranks, recompute]
        yield "tensor 2, tokens not split", [tensor % 2, "--parallelism.no-enable_sequence_parallel"]
        yield "pipeline 2, 1F1B, data parallel", [pipeline % 2]
        yield "pipeline 2, ZBV", [pipeline % 2, schedule + "ZBVZeroBubble"]
        yield "pipeline 2, tensor %d" % half, [pipeline % 2, tensor % half]


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
        print("| --- |" + " ---: |" * (len(CATEGORIES) + 3))
        differences = []
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
            differences.append(abs(difference))
            print("| %s | %s | %s | %s (%+.1f %%) | %s |" % (name, " | ".join(pairs), mib(fullest["total"]),
                                                            mib(predicted["total"]), difference, mib(fullest["pss"])),
                  flush=True)
        print("%d layouts: predicted and counted differ by %.2f %% on average, %.2f %% at most"
              % (len(differences), sum(differences) / len(differences), max(differences)))


if __name__ == "__main__":
    main()
