#!/usr/bin/env python3
"""Phalanx on one rank and one thread beside the same training in PyTorch, run in turn: losses, speed, memory.

    python benchmarks/single_rank.py --peer PATH/train.py --program build/release/bin/single_rank [--rounds 3]

The peer makes the initial weights and the tokens; both programs then train from them. Speed is compared by CPU time
of a step, which other programs on the machine hardly disturb, and by wall time. Prints a table and one line of JSON.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile


def run(command, tunables):
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLIBC_TUNABLES=tunables)
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=pathlib.Path, required=True, help="the PyTorch program")
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path("build/release/bin/single_rank"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tunables", default="glibc.malloc.hugetlb=1", help="for Phalanx, as its launcher sets them")
    args = parser.parse_args()
    rows = {"phalanx": [], "torch": []}
    with tempfile.TemporaryDirectory() as folder:
        weights, tokens = folder + "/init.safetensors", folder + "/data.tokens"
        peer = [sys.executable, str(args.peer), "--mode", "single", "--steps", str(args.steps), "--quiet"]
        run(peer[:-2] + ["1", "--quiet", "--save-init", weights], "")
        run(peer + ["--init-from", weights, "--save-tokens", tokens], "")
        for _ in range(args.rounds):
            rows["torch"].append(run(peer + ["--init-from", weights, "--tokens", tokens], ""))
            rows["phalanx"].append(run([str(args.program), weights, tokens, str(args.steps)], args.tunables))

    def median(name, key):
        values = [r[key][0] if isinstance(r[key], list) else r[key] for r in rows[name]]
        return statistics.median(values)

    keys = ["tokens_per_s", "cpu_ms_per_step", "pss_mib", "peak_rss_mib"]
    table = {name: {key: round(median(name, key), 1) for key in keys} for name in rows}
    apart = max(abs(a - b) for a, b in zip(rows["torch"][0]["losses"], rows["phalanx"][0]["losses"]))
    print(f"{'':20}{'phalanx':>12}{'torch':>12}{'ratio':>9}")
    for key in keys:
        ours, theirs = table["phalanx"][key], table["torch"][key]
        print(f"{key:20}{ours:12.1f}{theirs:12.1f}{ours / theirs:9.3f}")
    print(f"largest difference of the losses over {args.steps} steps: {apart:.2e}")
    print(json.dumps(table | {"loss_difference": apart, "rounds": args.rounds}))


if __name__ == "__main__":
    main()
