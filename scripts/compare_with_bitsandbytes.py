#!/usr/bin/env python3
"""Whether bitsandbytes and Phalanx say the same of a base in NF4.

    .venv/bin/python scripts/compare_with_bitsandbytes.py --program build/release/bin/phalanx  # needs torch, a network

For a small random Llama, as a Hugging Face folder in float32 and as bitsandbytes quantises it:
- `phalanx train` quantises the first one as it loads it, and takes the second one as it is. `phalanx checkpoint merge` of
  both runs, whose adapters add nothing, gives the weights that bitsandbytes' own dequantisation gives. On a CPU
  bitsandbytes rounds some scales near the middle of two 8-bit numbers to the farther one: those blocks are counted.
- The losses of both runs are nearly the same.
- `phalanx eval` says the same loss of a run's checkpoint, of bitsandbytes' folder with the run's adapter, and of these
  two merged; `phalanx generate` the same tokens. That adapter adds something.

Packages come into a folder of their own (--cache). Status 77: skipped, there is no network.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import pypi_libraries

LIBRARIES = ["safetensors", "numpy", "packaging"]
WITHOUT_TORCH = ["bitsandbytes==0.50.2"]
VOCAB, SEQ, DIM, FFN, LAYERS = 64, 16, 128, 256, 2
MATRICES = {"self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (DIM // 2, DIM), "self_attn.v_proj": (DIM // 2, DIM),
            "self_attn.o_proj": (DIM, DIM), "mlp.gate_proj": (FFN, DIM), "mlp.up_proj": (FFN, DIM),
            "mlp.down_proj": (DIM, FFN)}
CONFIG = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=VOCAB, hidden_size=DIM,
              intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu",
              tie_word_embeddings=False, torch_dtype="float32")
ROUNDING = 1e-6   # of the scales' mean, which bitsandbytes sums in another order
OTHER_SCALES = 0.01  # at most, of the blocks that Phalanx quantises


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def folder(path, tensors, **more):
    from safetensors.torch import save_file
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG | more))
    return path


def models(scratch):
    """The folders of both models, and what the second one's matrices are."""
    import torch
    import bitsandbytes.functional as bnb
    torch.manual_seed(1)
    whole = {"model.embed_tokens.weight": torch.randn(VOCAB, DIM), "model.norm.weight": torch.ones(DIM),
             "lm_head.weight": torch.randn(VOCAB, DIM) / DIM ** 0.5}
    in_4_bits, wide = dict(whole), {}
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            whole[f"model.layers.{layer}.{name}.weight"] = torch.ones(DIM)
            in_4_bits[f"model.layers.{layer}.{name}.weight"] = torch.ones(DIM)
        for name, shape in MATRICES.items():
            key = f"model.layers.{layer}.{name}.weight"
            whole[key] = torch.randn(shape) / DIM ** 0.5
            codes, state = bnb.quantize_4bit(whole[key], blocksize=64, compress_statistics=True, quant_type="nf4")
            wide[key] = bnb.dequantize_4bit(codes, state)
            in_4_bits[key] = codes
            in_4_bits |= {f"{key}.{part}": value for part, value in state.as_dict(packed=True).items()}
    how = dict(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return folder(scratch / "whole", whole), folder(scratch / "4bit", in_4_bits, quantization_config=how), wide


def trained(program, scratch, base):
    """A run whose adapters add nothing: its losses, and its merged weights."""
    from safetensors.torch import load_file
    run_folder, merged = scratch / f"{base.name}-run", scratch / f"{base.name}-merged"
    (scratch / "run.toml").write_text("")
    run(program, "train", scratch / "run.toml", "--job.dump_folder", run_folder, "--model.flavor", "hf", "--model.hf_assets_path", base,
        "--checkpoint.initial_load_in_hf", "--checkpoint.enable", "--lora.rank", 2, "--lora.base_dtype", "nf4",
        "--training.dataset_path", scratch / "tokens.bin", "--training.seq_len", SEQ, "--training.local_batch_size", 2,
        "--training.steps", 2, "--optimizer.lr", 0)
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    run(program, "checkpoint", "merge", run_folder, merged, "--dtype", "fp32")
    return [line["loss"] for line in lines if "loss" in line], load_file(merged / "model.safetensors")


def used(program, scratch, base):
    """What eval and generate say of a run on `base` that trains, in every form in which it can be given to them.

    And of trained()'s run, whose adapter adds nothing.
    """
    run_folder, merged = scratch / "used-run", scratch / "used-merged"
    run(program, "train", scratch / "run.toml", "--job.dump_folder", run_folder, "--model.flavor", "hf",
        "--model.hf_assets_path", base, "--checkpoint.initial_load_in_hf", "--checkpoint.enable", "--lora.rank", 2,
        "--lora.base_dtype", "nf4", "--training.dataset_path", scratch / "tokens.bin", "--training.seq_len", SEQ,
        "--training.local_batch_size", 2, "--training.steps", 20, "--optimizer.lr", 1e-2)
    with_adapter = ["--checkpoint", base, "--adapter", run_folder / "adapter"]
    run(program, "checkpoint", "merge", base, merged, "--adapter", run_folder / "adapter", "--dtype", "fp32")
    (scratch / "prompt.jsonl").write_text('{"ids": [3, 14, 15]}\n')
    found = {}
    ways = {"nothing": ["--checkpoint", scratch / f"{base.name}-run"], "run": ["--checkpoint", run_folder],
            "folder": with_adapter, "merged": ["--checkpoint", merged],
            "folder, tp": [*with_adapter, "-n", 2, "--tp", 2], "folder, pp": [*with_adapter, "-n", 2, "--pp", 2]}
    for name, how in ways.items():
        run(program, "eval", *how, "--tokens", scratch / "tokens.bin", "--seq-len", SEQ, "--max-tokens", 200, "--json",
            scratch / "eval.json", "--quiet")
        loss = json.loads((scratch / "eval.json").read_text())["loss"]
        ids = json.loads(run(program, "generate", *how, "--prompts-file", scratch / "prompt.jsonl", "--greedy",
                             "--max-new-tokens", 8))["ids"]
        found[name] = (loss, ids)
    return found


def other_blocks(merged, wide):
    """How many blocks of 64 elements have other values, and of how many."""
    differ = blocks = 0
    for key, value in wide.items():
        off = (merged[key] - value).abs().view(-1, 64).amax(1) > ROUNDING * value.abs().max()
        differ, blocks = differ + off.sum().item(), blocks + off.numel()
    return differ, blocks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", required=True, type=pathlib.Path)
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path.home() / ".cache/phalanx/bitsandbytes")
    options = parser.parse_args()
    pypi_libraries.bring(options.cache / "python", LIBRARIES, WITHOUT_TORCH)
    import numpy
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        ((numpy.arange(40 * SEQ) * 7 + 3) ** 2 % VOCAB).astype(numpy.uint16).tofile(scratch / "tokens.bin")
        whole, in_4_bits, wide = models(scratch)
        losses = []
        for base in (whole, in_4_bits):
            of_run, merged = trained(options.program.resolve(), scratch, base)
            losses.append(of_run)
            differ, blocks = other_blocks(merged, wide)
            print(f"{base.name}: {len(wide)} matrices, {differ} of {blocks} blocks differ")
            if differ > (OTHER_SCALES * blocks if base == whole else 0):
                sys.exit(f"{base.name}: too many")
        print(f"losses: {losses[0]}, {losses[1]}")
        if max(abs(a - b) for a, b in zip(*losses)) > 1e-3:
            sys.exit("the losses differ")
        found = used(options.program.resolve(), scratch, in_4_bits)
        print(f"used: {found}")
        of_base, _ = found.pop("nothing")
        of_run, ids = found["run"]
        if of_base - of_run < 0.1:
            sys.exit("the adapter adds nothing")
        if any(abs(loss - of_run) > 1e-5 or other != ids for loss, other in found.values()):
            sys.exit("eval or generate differ")


if __name__ == "__main__":
    main()
