#!/usr/bin/env python3
"""Whether transformers and Phalanx say the same of a model, in both directions. Run by hand.

    python scripts/check_hf_export.py --program build/release/bin/phalanx      # needs torch, transformers

For a small random model of each family that scripts/make_hf_golden.py knows: transformers saves it; `phalanx train`
starts from that directory and, at a learning rate of 0, leaves it as it is; what it exports at its end (hf/, in several
files), and what `phalanx checkpoint consolidate --hf` makes of its checkpoint, is loaded by transformers and must give the
same logits to the bit. `phalanx generate --greedy` must give the ids that transformers' generate() gives, and both must
stop at the token that the source calls the end of a text; where it names none, neither stops at any.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

import torch
import transformers

from make_hf_golden import CASES, VOCAB, model_class, settings, tokens

NEW = 8


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def load(folder):
    model, notes = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    wrong = {kind: names for kind, names in notes.items() if names}
    if wrong:
        raise SystemExit(f"{folder}: {wrong}")
    return model.eval()


def logits(folder):
    with torch.no_grad():
        return load(folder)(tokens()).logits


def stopped(model, prompt):
    made = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return made[0, len(prompt):].tolist()


def check_ends(name, program, source, ids, prompt, exports, scratch):
    """With the third token generated as the end of a text: in the source, and so in what is exported of it."""
    end = ids[2]
    expected = ids[:ids.index(end) + 1]
    for made in exports:
        config = json.loads((made / "generation_config.json").read_text())
        if config["eos_token_id"] != load(source).generation_config.eos_token_id:
            raise SystemExit(f"{name}: {made} ends a text by {config['eos_token_id']}")
        for file in ("config.json", "generation_config.json"):
            changed = json.loads((made / file).read_text()) | {"eos_token_id": end}
            (made / file).write_text(json.dumps(changed))
        if stopped(load(made), prompt) != expected:
            raise SystemExit(f"{name}: {made}: transformers does not stop at {end}: {stopped(load(made), prompt)}")
        found = json.loads(run(program, "generate", "--checkpoint", made, "--prompts-file", scratch / "prompt.jsonl",
                               "--greedy", "--max-new-tokens", NEW))["ids"]
        if found != expected[:-1]:
            raise SystemExit(f"{name}: {made}: Phalanx does not stop at {end}: {found}")


def check(name, family, options, program, ranks, scratch):
    torch.manual_seed(1)
    config = getattr(transformers, family + "Config")(**settings(family, dict(initializer_range=0.2) | options))
    source = scratch / name
    model_class(family)(config).save_pretrained(source, max_shard_size="20KB")
    (scratch / "tokens.bin").write_bytes(b"".join((i * 7 % VOCAB).to_bytes(2, "little") for i in range(4000)))
    outputs = scratch / f"{name}-run"
    (scratch / "run.toml").write_text("")
    run(program, "train", "-n", ranks, scratch / "run.toml", "--model.flavor=hf", f"--model.hf_assets_path={source}",
        "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf", "--checkpoint.enable",
        "--checkpoint.export_file_gb=0.00002",
        f"--training.dataset_path={scratch / 'tokens.bin'}", "--training.seq_len=16", "--training.local_batch_size=2",
        "--training.steps=1", "--optimizer.lr=0", "--validation.no-enable", "--metrics.no-enable_tensorboard",
        f"--parallelism.data_parallel_shard_degree={ranks}", f"--job.dump_folder={outputs}")
    run(program, "checkpoint", "consolidate", outputs / "checkpoint", scratch / f"{name}-hf", "--hf", "-q")
    expected = logits(source)
    for made in (outputs / "hf", scratch / f"{name}-hf"):
        if not torch.equal(logits(made), expected):
            raise SystemExit(f"{name}: {made} gives other logits: {(logits(made) - expected).abs().max()}")
    prompt = tokens()[0, :6].tolist()
    (scratch / "prompt.jsonl").write_text(json.dumps({"ids": prompt}) + "\n")
    found = json.loads(run(program, "generate", "--checkpoint", source, "--prompts-file", scratch / "prompt.jsonl",
                           "--greedy", "--max-new-tokens", NEW, "--ignore-end"))["ids"]
    model = load(source)
    model.generation_config.eos_token_id = None
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt):].tolist()
    if found[-NEW:] != ids:
        raise SystemExit(f"{name}: generated {found}, transformers {ids}")
    check_ends(name, program, source, ids, prompt, (outputs / "hf", scratch / f"{name}-hf"), scratch)
    print(f"{name}: exported twice, the same logits to the bit; {NEW} greedy tokens the same, and their end")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="these cases of make_hf_golden.py")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        for name, (family, options) in CASES.items():
            if arguments.only and name not in arguments.only:
                continue
            check(name, family, options, arguments.program.resolve(), arguments.ranks, pathlib.Path(scratch))


if __name__ == "__main__":
    main()
