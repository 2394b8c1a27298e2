#!/usr/bin/env python3
"""Fine-tuning on conversations by `phalanx train` and by transformers on the same machine: the same model, weights, rows, masks
and threads, in alternation; losses, and the processor time of a step.

    .venv/bin/python scripts/compare_sft.py --bin build/release/bin [--threads 1] [--steps 8] [--rounds 2] [--shape 5M 48M]

The conversations are paragraphs of docs/, the tokenizer is trained on them, the model is a Llama of random weights made by
transformers. Phalanx packs the conversations; the peer reads the token files and the mask and packs them by the rule of
phalanx/data/packed_rows.h. Its attention is scaled_dot_product_attention with a mask that keeps conversations apart, as on a
CPU there is no other in transformers; positions restart. The step is AdamW (fused), clipping to norm 1, a constant rate. Every
loss must agree within 1e-4, else the two did not train on the same.

transformers comes through pip into --cache and brings no torch: this Python must have one. Exits with 77 where it cannot be had.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import struct
import subprocess
import sys

import pypi_libraries

SKIP = 2
SHAPES = {"5M": dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                     intermediate_size=688),
          "48M": dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                      intermediate_size=2048)}
TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")


def run(command, threads=1):
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with status {done.returncode}:\n{done.stderr[-3000:]}")


def write_conversations(path):
    """Questions and answers of the lengths that paragraphs have, and some of several turns."""
    texts = [text for page in sorted(pathlib.Path("docs").glob("*.md"))
             for text in re.split(r"\n\n+", page.read_text()) if 40 < len(text) < 3000 and "|" not in text]
    lines = []
    for i in range(0, len(texts) - 1, 2):
        messages = []
        for text in texts[i:i + 1 + i % 3 // 2]:
            head, _, rest = text.partition(" ")
            messages += [{"role": "user", "content": f"Say more about {head}: {text[:80]}"},
                         {"role": "assistant", "content": rest or head}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def make_model(folder, shape, vocabulary):
    import torch
    import transformers
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=2048, tie_word_embeddings=False,
                                      **SHAPES[shape])
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def documents(prefix):
    """(ids, is_trained) of each document of a token file with a mask."""
    index = pathlib.Path(f"{prefix}.idx").read_bytes()
    code, count = struct.unpack_from("<BQ", index, 17)
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    width, letter = (2, "H") if code == 8 else (4, "i")
    ids, mask = pathlib.Path(f"{prefix}.bin").read_bytes(), pathlib.Path(f"{prefix}.mask").read_bytes()
    at, found = 0, []
    for length in lengths:
        found.append((struct.unpack_from(f"<{length}{letter}", ids, at * width), mask[at:at + length]))
        at += length
    return found


def pack(all_documents, seq_len):
    """The rows of packed_rows.h, of one window and in the file's order: lists of numbers of documents."""
    places = [len(ids) - 1 for ids, _ in all_documents]
    assert max(places) <= seq_len
    rows, rooms = [], {}
    for number in sorted(range(len(places)), key=lambda i: -places[i]):  # stable
        left = min((room for room, kept in rooms.items() if room >= places[number] and kept), default=None)
        if left is None:
            left, row = seq_len, len(rows)
            rows.append([])
        else:
            row = rooms[left].pop()
        rows[row].append(number)
        if left > places[number]:
            rooms.setdefault(left - places[number], []).append(row)
    return sorted(sorted(row) for row in rows)


def batch_of(all_documents, rows, seq_len):
    import torch
    inputs = torch.zeros(len(rows), seq_len, dtype=torch.long)
    labels = torch.full((len(rows), seq_len), -100)
    positions = torch.zeros(len(rows), seq_len, dtype=torch.long)
    owner = torch.zeros(len(rows), seq_len, dtype=torch.long)
    for i, row in enumerate(rows):
        at = 0
        for part, number in enumerate(row, 1):
            ids, is_trained = all_documents[number]
            end = at + len(ids) - 1
            inputs[i, at:end] = torch.tensor(ids[:-1])
            labels[i, at:end] = torch.tensor([token if trained else -100 for token, trained in zip(ids[1:], is_trained[1:])])
            positions[i, at:end] = torch.arange(end - at)
            owner[i, at:end] = part
            at = end
    causal = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()
    mask = (owner[:, :, None] == owner[:, None, :]) & causal
    return inputs, labels, positions, mask[:, None]


def run_peer(args, model_folder, prefix):
    """In a process of its own: prints one JSON line."""
    run_it = [sys.executable, __file__, "--bin", args.bin, "--cache", args.cache, "--peer", model_folder, prefix, "--steps",
              args.steps, "--threads", args.threads, "--seq-len", args.seq_len, "--batch", args.batch]
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run([str(c) for c in run_it], env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def peer(args):
    import time

    import torch
    import transformers
    torch.set_num_threads(args.threads)
    model_folder, prefix = args.peer
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    all_documents = documents(prefix)
    rows = pack(all_documents, args.seq_len)
    losses, cpu, wall = [], [], []
    for step in range(args.steps):
        taken = [rows[(step * args.batch + i) % len(rows)] for i in range(args.batch)]
        inputs, labels, positions, mask = batch_of(all_documents, taken, args.seq_len)
        begin, cpu_begin = time.perf_counter(), time.process_time()  # without making the batch, which ours has in it
        logits = model(input_ids=inputs, position_ids=positions, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().view(-1, logits.size(-1)), labels.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        cpu.append(time.process_time() - cpu_begin)
        wall.append(time.perf_counter() - begin)
    print(json.dumps({"losses": losses, "cpu": statistics.median(cpu[SKIP:]), "wall": statistics.median(wall[SKIP:])}))


def run_phalanx(args, model_folder, chats, folder):
    keys = {"job.dump_folder": folder, "model.flavor": "hf", "model.hf_assets_path": model_folder, "sft.conversations": chats,
            "sft.too_long": "leave_out", "training.seq_len": args.seq_len, "training.local_batch_size": args.batch,
            "training.steps": args.steps, "training.shuffle": "false", "training.max_norm": 1.0, "optimizer.lr": 1e-3,
            "optimizer.eps": 1e-8, "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0,
            "checkpoint.enable": "false", "checkpoint.initial_load_in_hf": "true", "metrics.enable_tensorboard": "false",
            "metrics.enable_report": "false"}
    shutil.rmtree(folder, ignore_errors=True)
    config = folder.with_suffix(".toml")
    config.write_text("")
    run([args.bin / "phalanx", "train", config, *[f"--{key}={value}" for key, value in keys.items()]], args.threads)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (made,) = (folder / "sft").glob("*/train.bin")
    return {"losses": [s["loss"] for s in steps], "cpu": statistics.median(sum(s["cpu_seconds"]) for s in steps[SKIP:]),
            "wall": statistics.median(s["seconds"] for s in steps[SKIP:])}, made.with_suffix("")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/release/bin"))
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("build/compare_sft"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--shape", nargs="+", default=["5M", "48M"], choices=SHAPES)
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    pypi_libraries.bring(args.cache / "python", ["transformers==5.24.0"])
    if args.peer:
        return peer(args)

    work = args.cache / "work"
    work.mkdir(parents=True, exist_ok=True)
    chats = work / "chats.jsonl"
    count = write_conversations(chats)
    print(f"{count} conversations, sequences of {args.seq_len}, {args.batch} a step, {args.threads} thread(s)")
    print("| model | round | phalanx CPU s | transformers CPU s | ratio | wall ratio | largest difference of losses |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for shape in args.shape:
        model = work / f"model-{shape}"
        if not (model / "tokenizer.json").exists():
            run([args.bin / "phalanx", "tokenize", "docs", "--extensions", ".md", "--vocab-size", 4096, "--tokenizer",
                 model / "tokenizer.json", "--quiet"])
            make_model(model, shape, 4096)
            (model / "chat_template.jinja").write_text(TEMPLATE)
        for number in range(args.rounds):
            ours, prefix = run_phalanx(args, model, chats, work / f"run-{shape}-{number}")
            theirs = run_peer(args, model, prefix)
            off = max(abs(a - b) / b for a, b in zip(ours["losses"], theirs["losses"]))
            print(f"| {shape} | {number + 1} | {ours['cpu']:.3f} | {theirs['cpu']:.3f} | {theirs['cpu'] / ours['cpu']:.2f} | "
                  f"{theirs['wall'] / ours['wall']:.2f} | {off:.1e} |", flush=True)
            if off > 1e-4:
                sys.exit("the losses differ: the two did not train on the same")


if __name__ == "__main__":
    main()
