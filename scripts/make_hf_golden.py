#!/usr/bin/env python3
"""Golden numbers for models read from Hugging Face directories: writes phalanx/models/testdata/hf_golden.json.

    python scripts/make_hf_golden.py           # needs torch and transformers; the file is in the repository already

For each small model: config.json as transformers writes it, names and shapes of its tensors, tokens, the logits after
each of them in fp32, 32 tokens that generate() adds to a prompt greedily, and the losses of 20 steps of training with
AdamW. Weights are a formula (see `weight`), so the file holds no weights.
"""

import argparse
import json
import pathlib
import tempfile
import zlib

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB, SEQ, NEW = 64, 24, 32
MARGIN = 4e-4  # between the two highest logits of a step, so that rounding does not decide
SMALL = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=None,
             eos_token_id=None, attn_implementation="eager")
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
LATENT = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_key_value_heads=4,
              num_hidden_layers=3, first_k_dense_replace=1, moe_intermediate_size=24)
LATENT_YARN = YARN | dict(mscale=0.7, mscale_all_dim=0.4)
# One factor for each of the pairs.
LONGROPE = dict(rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.1, 1.3, 1.6],
                long_factor=[1.0, 2.0, 3.5, 4.0])
# Its own names for the same numbers.
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
CASES = {
    "llama": ("Llama", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0), rms_norm_eps=1e-5)),
    "llama_linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))),
    # Both the sequence and what is generated are longer than the first training's.
    "llama_dynamic": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=100.0, factor=4.0),
                                    max_position_embeddings=16)),
    "llama_llama3": ("Llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "mistral_head_dim": ("Mistral", dict(sliding_window=None, head_dim=12)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2_window": ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=0,
                                     num_key_value_heads=4, intermediate_size=48)),
    "qwen3": ("Qwen3", dict(head_dim=12, tie_word_embeddings=True)),
    "gpt2": ("GPT2", GPT2),
    "gpt2_untied": ("GPT2", GPT2 | dict(n_inner=48, tie_word_embeddings=False)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mixtral_window": ("Mixtral", dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=5,
                                       tie_word_embeddings=True)),
    "llama_yarn": ("Llama", dict(rope_parameters=YARN)),
    "llama_yarn_mscale": ("Llama", dict(rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.4, truncate=False,
                                                                     beta_fast=4.0, beta_slow=0.5))),
    "qwen2_window_of_some": ("Qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3_moe": ("Qwen3Moe", dict(head_dim=12, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
                                   norm_topk_prob=True)),
    "qwen3_moe_shares": ("Qwen3Moe", dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
                                          norm_topk_prob=False, tie_word_embeddings=True)),
    "olmo2": ("Olmo2", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    "olmo2_heads": ("Olmo2", dict(num_key_value_heads=4, num_hidden_layers=3)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4)),
    "smollm3_window": ("SmolLM3", dict(num_hidden_layers=4, no_rope_layers=[1, 0, 0, 1], use_sliding_window=True,
                                       sliding_window=5, tie_word_embeddings=False)),
    "phi3": ("Phi3", dict(sliding_window=7, num_key_value_heads=4)),
    "phi3_partial": ("Phi3", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75),
                                  tie_word_embeddings=True)),
    "phi3_longrope_short": ("Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=60,
                                         max_position_embeddings=120)),
    "phi3_longrope_long": ("Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=16)),
    # The first tokens are generated with the angles of short sequences.
    "phi3_longrope_crossing": ("Phi3", dict(rope_parameters=LONGROPE, original_max_position_embeddings=26)),
    "gemma3": ("Gemma3Text", dict(head_dim=12, sliding_window=5, num_hidden_layers=4, query_pre_attn_scalar=20,
                                  layer_types=["sliding_attention", "full_attention"] * 2)),
    "gemma3_linear": ("Gemma3Text", dict(head_dim=8, sliding_window=6, num_hidden_layers=7, query_pre_attn_scalar=8,
                                         rope_parameters=dict(
                                             full_attention=dict(rope_type="linear", factor=8.0, rope_theta=500.0),
                                             sliding_attention=dict(rope_type="default", rope_theta=100.0)),
                                         tie_word_embeddings=False)),
    "deepseek_v2": ("DeepseekV2", LATENT | dict(n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
                                                q_lora_rank=None)),
    "deepseek_v2_groups": ("DeepseekV2", LATENT | dict(n_routed_experts=6, num_experts_per_tok=3, n_shared_experts=1,
                                                       q_lora_rank=20, topk_method="group_limited_greedy", n_group=3,
                                                       topk_group=2, routed_scaling_factor=2.0, v_head_dim=12,
                                                       rope_parameters=LATENT_YARN)),
    "deepseek_v3": ("DeepseekV3", LATENT | dict(n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
                                                q_lora_rank=20, n_group=4, topk_group=2)),
    "deepseek_v3_yarn": ("DeepseekV3", LATENT | dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2,
                                                     q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False,
                                                     routed_scaling_factor=1.5, first_k_dense_replace=0,
                                                     rope_parameters=LATENT_YARN, tie_word_embeddings=True)),
    # A limit that many of the values reach.
    "gpt_oss": ("GptOss", dict(head_dim=12, num_local_experts=6, num_experts_per_tok=3, sliding_window=5,
                               num_hidden_layers=3, swiglu_limit=0.5, rope_parameters=YARN | dict(truncate=False))),
    "gpt_oss_plain": ("GptOss", dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=7,
                                     layer_types=["full_attention", "sliding_attention"], tie_word_embeddings=True,
                                     rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    # Experts in 4 bits, as they are released.
    "gpt_oss_mxfp4": ("GptOss", dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
                                     intermediate_size=64,
                                     rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    "granite": ("Granite", dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2,
                                logits_scaling=2.5, tie_word_embeddings=True)),
    "granite_untied": ("Granite", dict(logits_scaling=0.7, num_key_value_heads=4, num_hidden_layers=3)),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
STEPS, BATCH = 20, 4
MXFP4 = {"gpt_oss_mxfp4": dict(quant_method="mxfp4")}
LEAST_PROMPT = {"phi3_longrope_long": 17}  # where all angles are those of long sequences from the first token on


def weight(name, shape, adds_one=False):
    """Element i: ((i * 2654435761 + crc32(name)) mod 2^32 / 2^32 - 0.5) * 0.4, plus 1 for the scales of norms, unless the
    model itself adds one to them. Of codes in 4 bits the highest byte of that number; of their scales 122 to 124."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    number = (i * 2654435761 + zlib.crc32(name.encode())) % 2**32
    if name.endswith("_blocks"):
        return (number // 2**24).to(torch.uint8).view(shape)
    if name.endswith("_scales"):
        return (122 + number // 2**16 % 3).to(torch.uint8).view(shape)
    x = number.double() / 2**32
    is_scale = not adds_one and ("norm" in name or (".ln_" in name and name.endswith("weight")))
    return ((x - 0.5) * 0.4 + (1.0 if is_scale else 0.0)).float().view(shape)


def tokens():
    i = torch.arange(SEQ)
    return ((i * i * 7 + i * 3 + 5) % VOCAB).view(1, SEQ)


def settings(family, options):
    """What is said of a model's shape: GPT-2 has its own keys."""
    common = {k: v for k, v in SMALL.items() if family != "GPT2" or not k.startswith(("num_", "hidden", "inter", "max_"))}
    return common | options


def model_class(family):
    return getattr(transformers, CLASSES.get(family, family + "ForCausalLM"))


def training_tokens(step):
    """[batch, seq + 1]: arithmetic progressions modulo a small number."""
    row = torch.arange(BATCH).add(BATCH * step).unsqueeze(1)
    column = torch.arange(SEQ + 1).unsqueeze(0)
    return (row * 7 + column * (row % 3 + 1)) % 61


def learning_rate(family):
    """Smaller where gradients of queries and keys are what is left of terms that cancel, as AdamW divides by their size."""
    return 3e-4 if family == "Gemma3Text" else 1e-3


def train(model, rate):
    """The losses of the first steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        batch = training_tokens(step)
        logits = model(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_mxfp4(shapes):
    """The experts' matrices [experts, in, out] as numbers of 4 bits, 32 of a row with one scale."""
    narrow = {}
    for name, shape in shapes.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            narrow[name] = shape
            continue
        experts, columns, rows = shape
        narrow[name + "_blocks"] = (experts, rows, columns // 32, 16)
        narrow[name + "_scales"] = (experts, rows, columns // 32)
    return narrow


def make(name, family, options):
    config = getattr(transformers, family + "Config")(**settings(family, options))
    with tempfile.TemporaryDirectory() as folder:
        # Names and shapes are those of the files, which for some families are not the module's.
        model_class(family)(config).save_pretrained(folder)
        path = pathlib.Path(folder) / "model.safetensors"
        shapes = {name: tensor.shape for name, tensor in load_file(path).items()}
        adds_one = family.startswith("Gemma")
        quantised = {}
        if name in MXFP4:
            shapes = in_mxfp4(shapes)
            file = pathlib.Path(folder) / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | dict(quantization_config=MXFP4[name])))
            quantised = dict(quantization_config=transformers.Mxfp4Config(dequantize=True))
        save_file({name: weight(name, shape, adds_one) for name, shape in shapes.items()}, path, {"format": "pt"})
        # Two, as rotary angles that depend on the length keep that of what was generated.
        model, trained = (model_class(family).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                               **quantised)
                          .eval() for _ in range(2))
    with torch.no_grad():
        logits = model(tokens()).logits[0]
        model.generation_config.eos_token_id = None
        for prompt in range(LEAST_PROMPT.get(name, 5), SEQ):
            out = model.generate(tokens()[:, :prompt], max_new_tokens=NEW, do_sample=False, output_scores=True,
                                 return_dict_in_generate=True)
            margin = torch.cat(out.scores).topk(2).values.diff().abs().min().item()
            if margin > MARGIN:
                break
        else:
            raise SystemExit(f"{family} {options}: no prompt with clear greedy choices")
    print(f"{name}: {prompt} tokens of prompt, least distance of the two highest logits {margin:.4f}")
    return {
        "config": json.loads(config.to_json_string(use_diff=False))
                  | (dict(quantization_config=MXFP4[name]) if name in MXFP4 else {}),
        "tensors": {name: list(shape) for name, shape in shapes.items()},
        "tokens": tokens()[0].tolist(),
        "logits": [[round(x, 6) for x in row] for row in logits[::3].tolist()],
        "logits_step": 3,
        "prompt": prompt,
        "generated": out.sequences[0, prompt:].tolist(),
        "learning_rate": learning_rate(family),
        "losses": [round(loss, 7) for loss in train(trained, learning_rate(family))],
    }


def main():
    here = pathlib.Path(__file__).resolve().parent.parent / "phalanx/models/testdata/hf_golden.json"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=here)
    parser.add_argument("--only", nargs="*", help="these cases anew; the others stay as they are in the file")
    arguments = parser.parse_args()
    output = arguments.output
    torch.manual_seed(0)
    golden = json.loads(output.read_text()) if arguments.only else {}
    golden |= {name: make(name, *case) for name, case in CASES.items() if not arguments.only or name in arguments.only}
    text = ",\n".join(f'"{name}": {json.dumps(case, separators=(",", ":"))}' for name, case in golden.items())
    output.write_text("{\n" + text + "\n}\n")


if __name__ == "__main__":
    main()
