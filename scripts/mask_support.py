#!/usr/bin/env python3
"""Runs `phalanx verify --all` with each kind of attention mask, and writes the table of docs/mask_support.md.

    scripts/mask_support.py [--program build/release/bin/phalanx] [--ranks 4]          prints the page
    scripts/mask_support.py --fix                                                     writes it

Each cell is the number of layouts of that form that verify has compared with one rank over two steps, in float32, bfloat16
and float16, with and without recomputation: losses, gradients, weights, and that no document sees another. Ends with
status 1 at the first layout that is wrong. About ten minutes on two cores; the texts are the lines of docs.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mask_support.md"
KINDS = {"causal": [], "block_causal": ["--training.attn_mask_type", "block_causal"],
         "packed": ["--training.attn_mask_type", "block_causal", "--training.packing", "best_fit"]}
CONFIG = """
[model]
flavor = "debug"
[training]
dataset_path = "tokens"
seq_len = 128
local_batch_size = 2
global_batch_size = 8
steps = 2
"""


def run(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(c) for c in command], cwd=folder, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with status {done.returncode}:\n{done.stdout[-3000:]}")


def form_of(layout):
    """"pp=2,dp_shard=2,zero=3,ac=full" is of the form "ZeRO-3 x pipeline"."""
    parts = dict(part.split("=") for part in layout.split(",") if "=" in part)
    names = []
    if int(parts.get("dp_replicate", 1)) > 1:
        names.append("DDP")
    cp = int(parts.get("cp", 1))
    if int(parts.get("dp_shard", 1)) > 1 or (cp > 1 and "zero" in parts):
        stage = f"ZeRO-{parts.get('zero', 3)}"
        names = [f"{stage}, replicated"] if names else [stage]
    if cp > 1:
        names.append("context by heads" if parts.get("exchange") == "heads" else "context")
    if int(parts.get("tp", 1)) > 1:
        names.append("tensor")
    if int(parts.get("pp", 1)) > 1:
        names.append("pipeline")
    return " x ".join(names) or "one rank"


def verified(program, ranks, kind, folder):
    report = folder / f"{kind}.json"
    run([program, "verify", "-n", ranks, "run.toml", "--all", "--steps", 2, "--json", report, *KINDS[kind]], folder)
    counts = collections.Counter()
    for entry in json.loads(report.read_text()):
        if "left_out" in entry:
            continue
        if not entry["right"]:
            sys.exit(f"mask_support: {kind}: {entry['layout']} is wrong")
        if kind != "causal" and not entry["documents_compared"]:
            sys.exit(f"mask_support: {kind}: {entry['layout']} has compared no two documents")
        counts[form_of(entry["layout"])] += 1
    return counts


def page(counts, ranks):
    forms = list(dict.fromkeys(form for kind in KINDS for form in counts[kind]))
    lines = ["# Masks and layouts", "",
             f"`scripts/mask_support.py --ranks {ranks}` writes this page. Each number says how many layouts of a form",
             "`phalanx verify --all` has compared with one rank, and found right: losses, gradients and weights, in float32,",
             "bfloat16 and float16, with and without recomputation. With documents it has also changed tokens, and seen that no",
             "other document's loss moved. What the masks are: [packed_documents.md](packed_documents.md).", "",
             "| layouts | " + " | ".join(f"`{kind}`" for kind in KINDS) + " |",
             "| --- |" + " ---: |" * len(KINDS)]
    lines += [f"| {form} | " + " | ".join(str(counts[kind][form]) for kind in KINDS) + " |" for form in forms]
    lines += ["| all | " + " | ".join(str(sum(counts[kind].values())) for kind in KINDS) + " |", ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/release/bin/phalanx", type=pathlib.Path)
    parser.add_argument("--ranks", default=4, type=int)
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    program = args.program.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with open(folder / "texts.jsonl", "w") as texts:
            for path in sorted((ROOT / "docs").glob("*.md")):
                for line in path.read_text().splitlines():
                    if len(line) > 20:
                        texts.write(json.dumps({"text": line}) + "\n")
        run([program, "tokenize", "--vocab-size", 512, "--tokenizer", "t.json", "--output", "tokens", "texts.jsonl"], folder)
        (folder / "run.toml").write_text(CONFIG)
        counts = {}
        for kind in KINDS:
            print(f"mask_support: {kind} ...", file=sys.stderr, flush=True)
            counts[kind] = verified(program, args.ranks, kind, folder)
    text = page(counts, args.ranks)
    if args.fix:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
