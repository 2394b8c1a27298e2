#!/usr/bin/env python3
"""Preference tuning beside TRL's DPOTrainer: the same losses, rewards and accuracies, step by step.

    .venv/bin/python scripts/compare_with_trl_dpo.py --program build/release/bin/phalanx      # needs torch, a network

Both tune the same small random Llama on the same pairs, four a step, in float32, with AdamW: with the sigmoid loss, with
the hinge loss, and with a LoRA adapter of PEFT that already adds something. The reference is the start. TRL's sigmoid loss
has no label smoothing.

Packages come into a folder of their own (--cache). Status 77: skipped, there is no network.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import warnings

import pypi_libraries

LIBRARIES = ["transformers==5.24.0", "tokenizers==0.23.3", "safetensors", "psutil", "numpy", "datasets==5.2.0", "jinja2"]
WITHOUT_TORCH = ["trl==1.16.0", "accelerate==1.15.0", "peft==0.21.2"]
STEPS, PAIRS, VOCAB = 8, 4, 300
TOLERANCE = 2e-5
TEMPLATE = ("{% for m in messages %}{{ m.role + ':' + m.content + '<|endoftext|>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")
LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
CASES = {"sigmoid": {}, "hinge": {"loss_type": "hinge"}, "adapter": {"beta": 0.3}}
METRICS = ["loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"]


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")


def preferences():
    """Pairs that take more than half of a row each, so that a row has one."""
    words = random.Random(1)

    def text(low, high):
        return " ".join(words.choice(["ranks", "send", "a tensor", "to all", "and wait", "42", "on the mesh"])
                        for _ in range(words.randint(low, high)))
    for _ in range(STEPS * PAIRS):
        yield {"prompt": [{"role": "user", "content": text(12, 13)}],
               "chosen": [{"role": "assistant", "content": text(10, 13)}],
               "rejected": [{"role": "assistant", "content": text(10, 13)}]}


def row_length(folder, pairs):
    """Tokens of a row that takes one pair and never two, as TRL's batches have a pair a row."""
    import transformers
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sizes = [sum(len(tokenizer.apply_chat_template(pair["prompt"] + pair[answer], return_dict=False)) for answer in ("chosen", "rejected"))
             for pair in pairs]
    if 2 * min(sizes) <= max(sizes) + 2:
        raise SystemExit(f"pairs of {min(sizes)} to {max(sizes)} tokens: two would share a row")
    return max(sizes)


def make_model(folder, program):
    import peft
    import torch
    import transformers
    words = folder / "words.txt"
    words.write_text("ranks send a tensor to all and wait 42 on the mesh\n" * 20)
    run(program, "tokenize", words, "--vocab-size", VOCAB, "--tokenizer", folder / "tokenizer.json", "--quiet")
    torch.manual_seed(1)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>",
                                                     pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, pad_token_id=None)  # transformers does not train the embedding of the padding
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(2)
    peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **LORA)).save_pretrained(
        folder / "adapter")


def theirs(folder, pairs, case, out):
    import datasets
    import peft
    import torch
    import transformers
    import trl

    class InOrder(trl.DPOTrainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if case == "adapter":
        model = peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    options = {"beta": 0.1} | CASES[case]
    options["loss_type"] = [options.get("loss_type", "sigmoid")]
    config = trl.DPOConfig(
        output_dir=str(out), per_device_train_batch_size=PAIRS, max_steps=STEPS, learning_rate=1e-3, weight_decay=0.0,
        adam_beta2=0.95, lr_scheduler_type="constant", max_grad_norm=1.0, logging_steps=1, report_to="none", use_cpu=True,
        bf16=False, fp16=False, gradient_checkpointing=False, save_strategy="no", max_length=None, disable_dropout=True,
        disable_tqdm=True, **options)
    trainer = InOrder(model=model, args=config, train_dataset=datasets.Dataset.from_list(pairs),
                      processing_class=transformers.AutoTokenizer.from_pretrained(folder))
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def ours(program, folder, file, seq, case, out):
    keys = {"job.dump_folder": out, "model.flavor": "hf", "model.hf_assets_path": folder, "dpo.preferences": file,
            "training.seq_len": seq, "training.local_batch_size": PAIRS, "training.steps": STEPS, "training.shuffle": "false",
            "training.max_norm": 1.0, "optimizer.lr": 1e-3, "optimizer.eps": 1e-8, "optimizer.weight_decay": 0,
            "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0, "checkpoint.enable": "false",
            "checkpoint.initial_load_in_hf": "true", "metrics.enable_tensorboard": "false", "metrics.enable_report": "false"}
    keys |= {f"dpo.{key}": value for key, value in CASES[case].items()}
    if case == "adapter":
        keys |= {"lora.rank": LORA["r"], "lora.alpha": LORA["lora_alpha"], "lora.initial_adapter": folder / "adapter",
                 "lora.target_modules": ",".join(LORA["target_modules"])}
    config = out.with_suffix(".toml")
    config.write_text("")
    run(program, "train", config, *[f"--{key}={value}" for key, value in keys.items()])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (made,) = (out / "dpo").glob("*/made.txt")
    if f"{STEPS * PAIRS} pairs" not in made.read_text():
        raise SystemExit(f"{case}: {made.read_text()}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path("build/release/bin/phalanx"))
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("build/compare_with_trl"))
    args = parser.parse_args()
    pypi_libraries.bring(args.cache / "python", LIBRARIES, WITHOUT_TORCH)
    warnings.filterwarnings("ignore")
    pairs = list(preferences())
    worst = 0
    print("| case | largest difference | loss, first and last step | rewards/margins, last step |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "model"
        folder.mkdir()
        make_model(folder, args.program)
        file = pathlib.Path(scratch) / "preferences.jsonl"
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        seq = row_length(folder, pairs)
        for case in CASES:
            mine = ours(args.program, folder, file, seq, case, pathlib.Path(scratch) / f"ours-{case}")
            other = theirs(folder, pairs, case, pathlib.Path(scratch) / f"theirs-{case}")
            if len(mine) != STEPS or len(other) != STEPS:
                raise SystemExit(f"{case}: {len(mine)} and {len(other)} steps")
            mine[0]["rewards/accuracies"] = other[0]["rewards/accuracies"]  # all margins are 0: rounding decides
            off = max(abs(a[key] - b[key]) / max(1, abs(b[key])) for a, b in zip(mine, other) for key in METRICS)
            print(f"| {case} | {off:.1e} | {mine[0]['loss']:.5f}, {mine[-1]['loss']:.5f} | {mine[-1]['rewards/margins']:.4f} |",
                  flush=True)
            worst = max(worst, off)
    if worst > TOLERANCE:
        sys.exit(f"a difference of {worst:.1e}: expected at most {TOLERANCE}")


if __name__ == "__main__":
    main()
