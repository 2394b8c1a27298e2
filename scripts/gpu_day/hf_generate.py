#!/usr/bin/env python3
"""Generates text with Hugging Face transformers and says how fast: the peer of `phalanx generate`.

    scripts/gpu_day/hf_generate.py make DIR [--dim 2048 --n-layers 16 --n-heads 32 --n-kv-heads 8 --ffn-hidden 8192]
    scripts/gpu_day/hf_generate.py run DIR --batch 8 [--new-tokens 128] [--dtype bfloat16] [--compile]

make writes a Llama with random weights (config.json, model.safetensors) and prompts.jsonl: --prompts prompts of
--prompt-tokens random token ids each. run continues the first --batch of them, greedily, always by --new-tokens tokens.
The closing line is JSON: `prefill_tokens_per_s` of the prompts, timed by a run that makes one token; and
`decode_tokens_per_s`, of all tokens but the first of each prompt, in the time that a run of --new-tokens takes longer.
Both are medians of --repeat runs after one that is not timed. --compile compiles the decoding step, with a static cache.
"""

import argparse
import json
import os
import statistics
import sys
import time

import torch
import transformers


def make(args):
    torch.manual_seed(args.seed)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab, hidden_size=args.dim, intermediate_size=args.ffn_hidden, num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads, num_key_value_heads=args.n_kv_heads, max_position_embeddings=4096,
        rope_theta=500000.0, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(args.folder)
    ids = torch.randint(args.vocab, (args.prompts, args.prompt_tokens), generator=torch.Generator().manual_seed(args.seed))
    with open(os.path.join(args.folder, "prompts.jsonl"), "w") as file:
        for row in ids.tolist():
            file.write(json.dumps({"ids": row}) + "\n")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {args.folder}")


def run(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype)).to(device).eval()
    with open(os.path.join(args.folder, "prompts.jsonl")) as file:
        rows = [json.loads(line)["ids"] for line in file][:args.batch]
    if len(rows) < args.batch:
        sys.exit(f"{args.folder}/prompts.jsonl: {len(rows)} prompts, expected {args.batch}")
    ids = torch.tensor(rows, device=device)
    options = {"cache_implementation": "static"} if args.compile else {}

    def seconds(new_tokens):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new_tokens,
                              max_new_tokens=new_tokens, pad_token_id=0, **options)
        if device == "cuda":
            torch.cuda.synchronize()
        if made.shape[1] != ids.shape[1] + new_tokens:
            sys.exit(f"{made.shape[1] - ids.shape[1]} tokens, expected {new_tokens}")
        return time.perf_counter() - begin

    with torch.inference_mode():
        for count in (1, args.new_tokens):
            seconds(count)
        prefill = statistics.median(seconds(1) for _ in range(args.repeat))
        whole = statistics.median(seconds(args.new_tokens) for _ in range(args.repeat))
    print(json.dumps({"peer": "transformers " + transformers.__version__, "batch": args.batch,
                      "prompt_tokens": ids.shape[1], "new_tokens": args.new_tokens, "compiled": args.compile,
                      "prefill_tokens_per_s": ids.numel() / prefill,
                      "decode_tokens_per_s": args.batch * (args.new_tokens - 1) / (whole - prefill)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder")
    for name, default in (("dim", 2048), ("n-layers", 16), ("n-heads", 32), ("n-kv-heads", 8), ("ffn-hidden", 8192),
                          ("vocab", 128256), ("prompts", 32), ("prompt-tokens", 512), ("seed", 1)):
        making.add_argument("--" + name, type=int, default=default)
    running = commands.add_parser("run")
    running.add_argument("folder")
    running.add_argument("--batch", type=int, default=8)
    running.add_argument("--new-tokens", type=int, default=128)
    running.add_argument("--repeat", type=int, default=3)
    running.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    running.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    (make if args.command == "make" else run)(args)


if __name__ == "__main__":
    main()
