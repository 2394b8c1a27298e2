"""What the fuzz targets start from: sound files of each kind, small, one folder a target.

    python3 tests/fuzz/make_seeds.py FOLDER

Needs nothing but Python. tests/fuzz/*.cc say how an input that stands for several files is put together.
"""

import gzip
import json
import pathlib
import struct
import sys
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = pathlib.Path(sys.argv[1])


def seed(target, name, content):
    path = FOLDER / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def as_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def safetensors(header, data):
    text = as_json(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def make_safetensors():
    two = {"a.weight": tensor("F32", [2, 3], 0, 24), "b": tensor("BF16", [], 24, 26), "empty": tensor("U8", [0, 4], 26, 26)}
    seed("safetensors_header", "two", safetensors(two, bytes(26)))
    offsets = {"a.weight": {"saved_offsets": [4, 0]}, "b": {"saved_offsets": []}, "empty": {"saved_offsets": [0, 0]}}
    metadata = {"DCP_SHARDING_INFO": as_json(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    seed("safetensors_header", "shard", safetensors({"__metadata__": metadata, **two}, bytes(26)))
    files = {f"layers.{i}.weight": f"model-0000{i % 2 + 1}-of-00002.safetensors" for i in range(4)}
    seed("weight_index", "two_files", as_json({"metadata": {"total_size": 96}, "weight_map": files}))
    seed("weight_index", "outside", as_json({"weight_map": {"a": "../model.safetensors", "b": "/model.safetensors"}}))


def make_prompts():
    seed("prompts", "prompts", '{"id": "a", "prompt": "x\\ny"}\n\n{"ids": [1, 2], "id": {"n": 1}}\r\n{"text": 3}\n')
    seed("prompts", "questions", '{"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}\n{"prompt": "", "choices": ["a"]}\n')


def make_chat_templates():
    golden = json.loads((ROOT / "phalanx/data/jinja/testdata/golden.json").read_text())
    for i, case in enumerate(golden["cases"]):
        context = "\0" + as_json(golden["context"]) if i % 4 == 0 else ""
        seed("chat_template", f"{i}", case["template"] + context)


def make_conversations():
    call = {"function": {"name": "f", "arguments": {"x": [1, 2.5]}}}
    records = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "reasoning": "R"}], "id": 3},
               {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}, {"role": "assistant", "content": None, "tool_calls": [call]},
                             {"role": "tool", "content": "1"}], "tools": [{"function": {"name": "f"}}], "chat_template_kwargs": {"x": True}},
               {"system": "S", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": "[]"},
               {"prompt": "a", "completion": "b"},
               {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}]
    seed("conversations", "all", "\n".join(map(as_json, records)))
    for i, record in enumerate(records):
        seed("conversations", f"{i}", as_json(record) + "\n{\"messages\": 1}\n")


def make_reports():
    run = {"description": "a </script> run", "begun": {"layout": "2 ranks"}, "environment": {"device": "cpu"},
           "history": [{"step": 2, "time": 1764093600.0, "layout": "1 rank",
                        "changes": [{"key": "[optimizer] lr", "saved": 0.2, "now": 0.1}]}, {"step": 1}],
           "branches": [{"step": 1}], "config": "[a]\nb = 1\n# c is not set\n", "sample": {"prompt": "x", "text": "y"}}
    steps = [{"step": i, "loss": 9 - i, "lr": 0.1, "memory_gib": [0.5] * i, "tokens": 64, "seconds": 0.5} for i in (1, 2, 3)]
    lines = [as_json(line) for line in [*steps, {"step": 3, "validation_loss": 5}]]
    lines.insert(2, '{"step":2,"loss":NaN,"lr":-Infinity,"grad_norm":null}')
    seed("report", "run", as_json(run) + "\0" + "\n".join(lines) + '\n{"step":4,"lo')


def make_hf_configs():
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
    for family in ("llama", "mistral", "qwen2", "qwen3", "mixtral"):
        seed("hf_config", family, as_json({"model_type": family, **common}))
    for rope in ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 128},
                 {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 4.0}):
        name = rope.get("rope_type", "linear")
        seed("hf_config", name, as_json({"model_type": "llama", **common, "head_dim": 16, "rope_scaling": rope}))
    seed("hf_config", "window", as_json({"model_type": "qwen2", **common, "use_sliding_window": True, "sliding_window": 32,
                                         "layer_types": ["sliding_attention"] * 2}))


def make_tokenizers():
    golden = json.loads((ROOT / "phalanx/data/tokenizer/testdata/tokenizer_families.json").read_text())
    text = " Hello  w\u00f6rld <s> it's 12:30 \u4f60\u597d\u2581x\n"
    for name in ("gpt2", "qwen", "llama2", "split_kinds"):
        whole = golden[name]["tokenizer"]
        seed("tokenizer", name, as_json(whole).encode() + b"\0" + text.encode() + b"\xff\xc3")
    # Small ones, in which a mutation hits something else than the vocabulary.
    letters = {c: i for i, c in enumerate("abcdefgh\u2581")}
    steps = {
        "none": (None, None, {"type": "Fuse"}),
        "metaspace": ({"type": "Prepend", "prepend": "\u2581"},
                      {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True},
                      {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"},
                                                        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}),
        "regex": ({"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"},
                                                       {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": "_"}]},
                  {"type": "Sequence", "pretokenizers": [
                      {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|[^\\s]+"}, "behavior": "Isolated", "invert": False},
                      {"type": "Digits", "individual_digits": True}, {"type": "Punctuation"}]},
                  {"type": "Replace", "pattern": {"String": "_"}, "content": " "}),
    }
    for name, (normalizer, pre_tokenizer, decoder) in steps.items():
        vocabulary = {**letters, "<unk>": 9, "ab": 10, "\u2581a": 11, "<0x41>": 12}
        seed("tokenizer", "small_" + name, as_json({
            "version": "1.0",
            "added_tokens": [{"id": 13, "content": "<s>", "special": True, "lstrip": True, "single_word": True}],
            "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
            "post_processor": {"type": "TemplateProcessing",
                               "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                               "special_tokens": {"<s>": {"ids": [13]}}},
            "decoder": decoder,
            "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True, "ignore_merges": False,
                      "vocab": vocabulary, "merges": ["a b", ["\u2581", "a"]]}}).encode() + b"\0ab a<s> h_\xc3\xb6 12")


def make_manifests():
    model = {"name": "llama", "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_hidden": 128, "vocab_size": 512,
             "max_seq_len": 256, "rope_theta": 10000.0, "norm_eps": 1e-5, "tie_embeddings": False}
    manifest = {"format": "phalanx-checkpoint", "version": 1, "step": 100, "integers": {"step": 100, "seed": 1},
                "metadata": {"model": model}, "block_bytes": 1 << 20,
                "files": [{"name": "shard-00001-model-00001-of-00001.safetensors", "size": 1234567,
                           "xxh3": ["0123456789abcdef", "fedcba9876543210"]}]}
    seed("manifest", "one", as_json(manifest)[1:])  # the target puts the line of the checksum before it
    hostile = {**manifest, "files": [{"name": "../../etc/passwd", "size": 0, "xxh3": []}]}
    seed("manifest", "outside", as_json(hostile)[1:])


def make_token_files():
    ids = struct.pack("<12H", *range(12))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i", 5, 7) + struct.pack("<2q", 0, 10)
    index += struct.pack("<3q", 0, 1, 2)
    seed("token_file", "megatron", bytes([1, 12]) + struct.pack("<H", len(index)) + index + ids)
    seed("token_file", "raw", bytes([0, 12, 0, 0]) + ids)
    for magic, version, code in ((20240520, 1, "H"), (20240801, 7, "I")):
        header = struct.pack("<3i", magic, version, 12)
        seed("token_file", f"llmc_{version}", bytes(4) + header.ljust(1024, b"\0") + struct.pack(f"<12{code}", *range(12)))


def make_images():
    labels = struct.pack(">BBBBI", 0, 0, 8, 1, 2) + bytes([3, 9])
    images = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 28, 28) + bytes(range(256)) * 6 + bytes(2 * 784 - 6 * 256)
    cifar = (bytes([7]) + bytes(3072)) * 2
    for name, pack in (("plain", bytes), ("gzip", lambda data: gzip.compress(data, mtime=0))):
        seed("images", f"mnist_{name}", bytes([0]) + struct.pack("<H", len(pack(labels))) + pack(labels) + pack(images))
        seed("images", f"cifar_{name}", bytes([3, 0, 0]) + pack(cifar))
    seed("images", "no_gzip", bytes([3, 0, 0]) + zlib.compress(cifar))


def make_corpora():
    records = '{"text": "one\\nof two", "id": 1}\n\n{"text": null}\r\n{"text": "caf\\u00e9"}'
    for name, number, content in (("text", 0, "# Title\n\nSome text.\n"), ("records", 1, records), ("list", 2, f"[{records}]")):
        seed("corpus", name, bytes([number]) + content.encode())
        seed("corpus", f"{name}_gzip", bytes([number]) + gzip.compress(content.encode(), mtime=0))


def make_configs():
    for path in [*ROOT.glob("configs/*.toml"), *ROOT.glob("recipes/*.toml")]:
        seed("config", path.name, path.read_text())
    seed("config", "short", '[training]\nsteps = 10\n[optimizer]\nlr = 1e-3\n[metrics]\nlog_freq = 1_0\nsample_prompt = """a\n"""\n')


def make_schedules():
    seed("schedule_csv", "gpipe", "0F0,0F1,,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    seed("schedule_csv", "transfers", "0F0,0SEND_F0,0RECV_B0,0I0,0W0,0REDUCE_GRAD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n")
    seed("schedule_csv", "overlap", '0F0,0F1,"(0F2;3B0)OVERLAP_F_B",3B1\n1F0,2F0,1B0,2B0\n')


for make in (make_safetensors, make_hf_configs, make_prompts, make_chat_templates, make_conversations, make_tokenizers, make_manifests, make_token_files, make_images, make_corpora, make_configs,
             make_reports, make_schedules):
    make()
