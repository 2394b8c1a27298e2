#!/usr/bin/env python3
"""Trains small models for a few steps under each layout, and prints what the fullest rank took beside what was predicted:
the tables of benchmarks/results/memory.md.

    scripts/memory_table.py [--program build/release/bin/phalanx] [--ranks 4] [-- --model.flavor 50M ...]
    scripts/memory_table.py --families gpt2 mixtral ...      a column for each family, totals alone
"""
import argparse
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

SHARDED = "--parallelism.data_parallel_shard_degree="
CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "buffers"]


def layouts(ranks):
    all_ranks, recompute = SHARDED + "-1", "--activation_checkpoint.mode=full"
    tensor, pipeline = "--parallelism.tensor_parallel_degree=%d", "--parallelism.pipeline_parallel_degree=%d"
    schedule, stage = "--parallelism.pipeline_parallel_schedule=", "--parallelism.zero_stage=%d"
    yield "data parallel", []
    yield "data parallel, recomputing", [recompute]
    yield "ZeRO-1", [all_ranks, stage % 1]
    yield "ZeRO-2", [all_ranks, stage % 2]
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
        yield "tensor 2, ZeRO-1", [tensor % 2, all_ranks, stage % 1]
        yield "tensor 2, ZeRO-3", [tensor % 2, all_ranks]
        yield "tensor 2, ZeRO-3, recomputing", [tensor % 2, all_ranks, recompute]
        yield "tensor 2, tokens not split", [tensor % 2, "--parallelism.no-enable_sequence_parallel"]
        yield "pipeline 2, 1F1B, data parallel", [pipeline % 2]
        yield "pipeline 2, ZBV", [pipeline % 2, schedule + "ZBVZeroBubble"]
        yield "pipeline 2, tensor %d" % half, [pipeline % 2, tensor % half]
        yield "pipeline 2, 1F1B, ZeRO-1", [pipeline % 2, all_ranks, stage % 1]
        yield "pipeline 2, 1F1B, ZeRO-2", [pipeline % 2, all_ranks, stage % 2]
        yield "pipeline 2, 1F1B, ZeRO-3", [pipeline % 2, all_ranks]
        yield "pipeline 2, GPipe, ZeRO-3, always let go", [
            pipeline % 2, all_ranks, schedule + "GPipe", "--parallelism.fsdp_reshard_after_forward=always"]
        yield "pipeline 2, 1F1B, ZeRO-3, recomputing", [pipeline % 2, all_ranks, recompute]
        yield "pipeline 2, ZBV, ZeRO-1", [pipeline % 2, all_ranks, schedule + "ZBVZeroBubble", stage % 1]
        yield "pipeline 2, ZBV, ZeRO-3, always let go", [
            pipeline % 2, all_ranks, schedule + "ZBVZeroBubble", "--parallelism.fsdp_reshard_after_forward=always"]
    if ranks % 4 == 0 and ranks > 4:
        yield "pipeline 2, tensor 2, ZeRO-3", [pipeline % 2, tensor % 2, all_ranks]


# Models of the size of the flavor 5M, with what their families have beside it.
NUMBERS = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
           "intermediate_size": 688, "vocab_size": 4096, "max_position_embeddings": 128}
FAMILIES = {
    "llama": NUMBERS,
    "mistral": dict(NUMBERS, sliding_window=64),
    "qwen2": dict(NUMBERS, tie_word_embeddings=True),
    "qwen3": dict(NUMBERS, head_dim=96, tie_word_embeddings=True),
    "mixtral": dict(NUMBERS, intermediate_size=344, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 4096},
}

CONFIG = """
[job]
dump_folder = "{folder}/run"
[model]
flavor = "hf"
hf_assets_path = "{folder}/{family}"
[training]
dataset_path = "{folder}/tokens.bin"
seq_len = 128
local_batch_size = 4
steps = 3
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = false
initial_random_weights = true
[metrics]
enable_tensorboard = false
enable_report = false
"""


def mib(count):
    return "%.1f" % (count / 2**20)


class Runs:
    def __init__(self, folder, options):
        self.folder, self.options, self.differences = folder, options, []
        tokens = random.Random(1)
        ids = [tokens.randrange(4096) for _ in range(100_000)]
        pathlib.Path(folder, "tokens.bin").write_bytes(struct.pack("<%dH" % len(ids), *ids))
        for family, numbers in FAMILIES.items():
            pathlib.Path(folder, family).mkdir()
            pathlib.Path(folder, family, "config.json").write_text(json.dumps(dict(numbers, model_type=family)))
            pathlib.Path(folder, family + ".toml").write_text(CONFIG.format(folder=folder, family=family))

    def run(self, family, name, keys):
        """The fullest rank, the prediction, and by how many per cent that is more."""
        options = self.options
        config = pathlib.Path(self.folder, family + ".toml")
        run = subprocess.run(
            [options.program, "train", "-n", str(options.ranks), str(config), *keys, *options.more],
            capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
        if run.returncode != 0:
            sys.exit("memory_table: %s, %s failed:\n%s" % (family, name, run.stderr))
        memory = json.loads(pathlib.Path(self.folder, "run", "run.json").read_text())["memory"]
        fullest = max(memory["measured"], key=lambda rank: rank["total"])
        difference = 100 * (memory["predicted"]["total"] / fullest["total"] - 1)
        self.differences.append(abs(difference))
        return fullest, memory["predicted"], difference

    def summary(self):
        count = len(self.differences)
        return ("%d runs: predicted and counted differ by %.2f %% on average, %.2f %% at most"
                % (count, sum(self.differences) / count, max(self.differences)))


def table_of_categories(runs, chosen):
    print("| layout | " + " | ".join(CATEGORIES) + " | peak, counted | predicted | PSS |")
    print("| --- |" + " ---: |" * (len(CATEGORIES) + 3))
    for name, keys in chosen:
        fullest, predicted, difference = runs.run("llama", name, keys)
        pairs = ["%s / %s" % (mib(fullest[c]), mib(predicted[c])) for c in CATEGORIES]
        print("| %s | %s | %s | %s (%+.1f %%) | %s |" % (name, " | ".join(pairs), mib(fullest["total"]),
                                                        mib(predicted["total"]), difference, mib(fullest["pss"])),
              flush=True)


def table_of_families(runs, chosen, families):
    print("| layout | " + " | ".join(families) + " |")
    print("| --- |" + " ---: |" * len(families))
    for name, keys in chosen:
        cells = []
        for family in families:
            fullest, _, difference = runs.run(family, name, keys)
            cells.append("%s (%+.1f %%)" % (mib(fullest["total"]), difference))
        print("| %s | %s |" % (name, " | ".join(cells)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default="build/release/bin/phalanx")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, help="a table of totals, a column for each")
    parser.add_argument("--layouts", default="", help="regular expression: only layouts whose names have it")
    parser.add_argument("more", nargs="*", help="configuration keys for every run, after --")
    options = parser.parse_args()
    chosen = [one for one in layouts(options.ranks) if re.search(options.layouts, one[0])]
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(folder, options)
        if options.families:
            table_of_families(runs, chosen, options.families)
        else:
            table_of_categories(runs, chosen)
        print(runs.summary())


if __name__ == "__main__":
    main()
