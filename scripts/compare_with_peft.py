#!/usr/bin/env python3
"""Whether PEFT and Phalanx say the same of LoRA adapters, in both directions.

    .venv/bin/python scripts/compare_with_peft.py --program build/release/bin/phalanx      # needs torch, a network

For a small random model of several families:
- PEFT makes a random adapter. `phalanx generate --adapter` gives the ids that PEFT's model gives, `phalanx eval
  --adapter` its log-likelihoods, and `phalanx checkpoint merge` the bits of PEFT's own merge.
- `phalanx train` goes on with that adapter. Its losses are those of torch with PEFT on the same rows. Where a layer of
  the files is several of Phalanx's (GPT-2, Phi-3), PEFT trains the adapter in blocks that Phalanx would save.
- PEFT loads the adapter that this run has saved, with no name missing or left over. Its merge has the bits of
  `phalanx checkpoint merge` and of the run's hf/, and its logits are those of the merged model.

Packages come into a folder of their own (--cache). Status 77: skipped, there is no network.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import warnings

import pypi_libraries

LIBRARIES = ["transformers==5.24.0", "tokenizers==0.23.3", "safetensors", "psutil", "numpy"]
WITHOUT_TORCH = ["peft==0.21.2", "accelerate==1.15.0"]
VOCAB, SEQ, NEW, STEPS, ROWS = 64, 16, 8, 10, 4
LOSS_TOLERANCE = 2e-5
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=None,
             eos_token_id=None, initializer_range=0.2, attn_implementation="eager")
LATENT = dict(num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
              v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1,
              n_group=2, topk_group=1, first_k_dense_replace=1)
# The names of nets mean routed experts, too, for PEFT.
LATENT_LAYERS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=48, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
CASES = {"llama": ("Llama", {}, dict(r=4, lora_alpha=8, target_modules="all-linear")),
         "llama_tied": ("Llama", dict(tie_word_embeddings=True), dict(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"])),
         "mistral": ("Mistral", dict(sliding_window=5), dict(r=3, lora_alpha=3, target_modules=["down_proj", "k_proj"])),
         "qwen2": ("Qwen2", {}, dict(r=4, lora_alpha=16, target_modules=["o_proj", "gate_proj", "q_proj"])),
         "qwen3": ("Qwen3", dict(head_dim=12), dict(r=5, lora_alpha=7, target_modules="all-linear", use_rslora=True)),
         "deepseek_v3": ("DeepseekV3", LATENT, dict(r=4, lora_alpha=8, target_modules=LATENT_LAYERS)),
         "llama_output": ("Llama", {}, dict(r=4, lora_alpha=8, target_modules=["q_proj", "lm_head"])),
         "gpt2": ("GPT2", GPT2, dict(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj", "c_fc"],
                                     fan_in_fan_out=True)),
         "phi3": ("Phi3", {}, dict(r=3, lora_alpha=5, target_modules="all-linear", use_rslora=True))}
# Layers that are several of Phalanx's, each with an adapter of its own: the rows of these.
JOINED = {"c_attn": (32, 32, 32), "qkv_proj": (32, 16, 16), "gate_up_proj": (48, 48)}


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def tokens(torch):
    i = torch.arange(2 * SEQ)
    return ((i * i * 7 + i * 3 + 5) % VOCAB).view(2, SEQ)


class Case:
    def __init__(self, name, program, scratch):
        import peft
        import torch
        import transformers
        self.peft, self.torch, self.transformers = peft, torch, transformers
        family, options, self.lora = CASES[name]
        self.name, self.program, self.scratch = name, program, scratch / name
        torch.manual_seed(1)
        others = ("num_", "hidden", "inter", "max_") if family == "GPT2" else ()  # it has other names for these
        shape = {k: v for k, v in SHAPE.items() if not k.startswith(others)}
        config = getattr(transformers, family + "Config")(**(shape | options))
        self.base = self.scratch / "base"
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(self.base)
        self.adapter = self.scratch / "adapter"
        config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **self.lora)
        peft.get_peft_model(self.load_base(), config).save_pretrained(self.adapter)

    def fail(self, text):
        raise SystemExit(f"{self.name}: {text}")

    def load_base(self, folder=None):
        model, notes = self.transformers.AutoModelForCausalLM.from_pretrained(
            folder or self.base, dtype=self.torch.float32, attn_implementation="eager", output_loading_info=True)
        wrong = {kind: names for kind, names in notes.items() if names}
        if wrong:
            self.fail(f"{folder}: {wrong}")
        return model.eval()

    def load(self, adapter, trains=False):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # PEFT warns of names that are missing or left over
            model = self.peft.PeftModel.from_pretrained(self.load_base(), adapter, is_trainable=trains)
        return model.train() if trains else model.eval()

    def separate(self, adapter):
        """The same adapter with an A for each part of the layers in JOINED, as Phalanx has them and saves them."""
        import safetensors.torch
        torch, folder = self.torch, self.scratch / "separate"
        config = json.loads((adapter / "adapter_config.json").read_text())
        tensors = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
        for name, b in list(tensors.items()):
            layer = name.split(".")[-3]
            if layer not in JOINED or not name.endswith("lora_B.weight"):
                continue
            parts, of_a = len(JOINED[layer]), name.replace("lora_B", "lora_A")
            tensors[name] = torch.block_diag(*b.split(JOINED[layer]))
            tensors[of_a] = torch.cat([tensors[of_a]] * parts)
            config["rank_pattern"][layer] = parts * config["r"]
            times = math.sqrt(parts) if config["use_rslora"] else parts
            config["alpha_pattern"][layer] = config["lora_alpha"] * times
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
        return folder

    def keep_apart(self, model):
        """A part's B has no gradient where it would use another's A."""
        for name, b in model.named_parameters():
            rows = JOINED.get(name.split(".")[-4]) if "lora_B" in name else None
            if rows:
                mask = self.torch.block_diag(*(self.torch.ones(count, self.lora["r"]) for count in rows))
                b.register_hook(lambda gradient, mask=mask: gradient * mask)

    def logits(self, model):
        with self.torch.no_grad():
            return model(tokens(self.torch)).logits

    def compare_merge(self, merged, adapter):
        """Phalanx's folder beside PEFT's merge, tensor by tensor."""
        expected = self.load(adapter).merge_and_unload().state_dict()
        found = self.load_base(merged).state_dict()
        if sorted(expected) != sorted(found):
            self.fail(f"{merged} has other tensors: {sorted(set(expected) ^ set(found))}")
        differ = [name for name in expected if not self.torch.equal(expected[name], found[name])]
        if differ:
            self.fail(f"{merged}: {len(differ)} of {len(expected)} tensors have other bits: {differ[:3]}")
        changed = [n for n in expected if not self.torch.equal(expected[n], self.load_base().state_dict()[n])]
        if not changed:
            self.fail("the merge changed nothing")

    def check_peft_to_phalanx(self):
        torch, model = self.torch, self.load(self.adapter)
        prompt = tokens(torch)[0, :6].tolist()
        (self.scratch / "prompt.jsonl").write_text(json.dumps({"ids": prompt}) + "\n")
        found = json.loads(run(self.program, "generate", "--checkpoint", self.base, "--adapter", self.adapter,
                               "--prompts-file", self.scratch / "prompt.jsonl", "--greedy", "--max-new-tokens", NEW,
                               "--ignore-end"))["ids"]
        model.generation_config.eos_token_id = None
        ids = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, 6:].tolist()
        if found[-NEW:] != ids:
            self.fail(f"generated {found}, PEFT {ids}")
        (self.scratch / "text.bin").write_bytes(b"".join(int(t).to_bytes(2, "little") for t in tokens(torch)[0]))
        run(self.program, "eval", "--checkpoint", self.base, "--adapter", self.adapter, "--tokens",
            self.scratch / "text.bin", "--seq-len", SEQ, "--json", self.scratch / "eval.json", "--quiet")
        figures = json.loads((self.scratch / "eval.json").read_text())
        row = tokens(torch)[:1]
        with torch.no_grad():
            loss = model(row, labels=row).loss.item()
        found = next(figures[key] for key in ("loss", "nll", "mean_nll") if key in figures)
        if not math.isclose(found, loss, rel_tol=1e-5):
            self.fail(f"eval says {figures}, PEFT a loss of {loss}")
        run(self.program, "checkpoint", "merge", self.base, self.scratch / "merged", "--adapter", self.adapter)
        self.compare_merge(self.scratch / "merged", self.adapter)

    def train(self, ranks):
        rows = [(i * 7 + i // 5) % VOCAB for i in range(STEPS * ROWS * SEQ + 1)]
        (self.scratch / "tokens.bin").write_bytes(b"".join(t.to_bytes(2, "little") for t in rows))
        (self.scratch / "run.toml").write_text("")
        outputs = self.scratch / f"run-{ranks}"
        targets = self.lora["target_modules"]
        run(self.program, "train", *(["-n", ranks] if ranks > 1 else []), self.scratch / "run.toml",
            "--model.flavor=hf", f"--model.hf_assets_path={self.base}", "--checkpoint.initial_load_in_hf",
            "--checkpoint.last_save_in_hf", f"--lora.rank={self.lora['r']}", f"--lora.alpha={self.lora['lora_alpha']}",
            f"--lora.target_modules={targets if isinstance(targets, str) else ','.join(targets)}",
            *(["--lora.use_rslora"] if self.lora.get("use_rslora") else []),
            f"--lora.initial_adapter={self.adapter}", f"--training.dataset_path={self.scratch / 'tokens.bin'}",
            f"--training.seq_len={SEQ}", f"--training.local_batch_size={ROWS // ranks}",
            f"--training.global_batch_size={ROWS}", "--training.no-shuffle", f"--training.steps={STEPS}",
            "--training.max_norm=0", "--optimizer.lr=1e-3", "--optimizer.beta2=0.999", "--optimizer.weight_decay=0.01",
            "--lr_scheduler.warmup_steps=0", "--lr_scheduler.decay_ratio=0", "--validation.no-enable",
            "--metrics.no-enable_tensorboard", f"--parallelism.data_parallel_shard_degree={ranks}",
            f"--job.dump_folder={outputs}")
        lines = [json.loads(line) for line in (outputs / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        torch, model = self.torch, self.load(self.separate(self.adapter), trains=True)
        self.keep_apart(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.999),
                                      eps=1e-8, weight_decay=0.01)
        expected = []
        for step in range(STEPS):
            first = step * ROWS * SEQ
            x = torch.tensor(rows[first:first + ROWS * SEQ]).view(ROWS, SEQ)
            y = torch.tensor(rows[first + 1:first + ROWS * SEQ + 1]).view(ROWS, SEQ)
            loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        largest = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        if largest > LOSS_TOLERANCE:
            self.fail(f"losses {losses}, with PEFT {expected}")
        return outputs, largest

    def check_phalanx_to_peft(self, ranks):
        outputs, largest = self.train(ranks)
        trained = self.load(outputs / "adapter")
        run(self.program, "checkpoint", "merge", self.base, outputs / "merged", "--adapter", outputs / "adapter")
        run(self.program, "checkpoint", "merge", outputs / "checkpoint", outputs / "merged-from-run")
        for merged in (outputs / "merged", outputs / "merged-from-run", outputs / "hf"):
            self.compare_merge(merged, outputs / "adapter")
            off = (self.logits(self.load_base(merged)) - self.logits(trained)).abs().max().item()
            if off > 1e-4:
                self.fail(f"{merged}: logits are {off} from PEFT's")
        if self.torch.allclose(self.logits(trained), self.logits(self.load(self.adapter)), atol=1e-4):
            self.fail("training changed nothing")
        return largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, required=True)
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("build/peft"))
    parser.add_argument("--ranks", type=int, default=2, help="of a second run of each model, sharded")
    arguments = parser.parse_args()
    try:
        import torch  # noqa: F401
    except ImportError:
        pypi_libraries.skip(f"{sys.executable} has no torch")
    pypi_libraries.bring(arguments.cache / "python", LIBRARIES, WITHOUT_TORCH)
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    with tempfile.TemporaryDirectory() as scratch:
        for name in CASES:
            case = Case(name, arguments.program.resolve(), pathlib.Path(scratch))
            case.check_peft_to_phalanx()
            largest = [case.check_phalanx_to_peft(ranks) for ranks in (1, arguments.ranks)]
            print(f"{name}: {NEW} greedy tokens and the loss as PEFT's; merges of its adapter and of ours to the bit; losses "
                  f"of {STEPS} steps within {max(largest):.1e}")


if __name__ == "__main__":
    main()
