"""Writes phalanx/data/testdata/tokenizer_*.json: what the `tokenizers` package does with some texts.

tokenizer_golden.json holds training documents, the tokenizer.json that `tokenizers` trains from them (GPT-2's split
pattern, and Llama 3's with ignore_merges) and the ids of varied strings. tokenizer_families.json holds a small
tokenizer.json of each kind of tokenizer_families.py and, for each string, the start of a hash of its ids with and without
the template's special tokens and of the text decoded from them. The tests compare Phalanx with both and need no Python.

    python scripts/make_tokenizer_golden.py             # or: ... golden, ... families

The other direction, a tokenizer.json that Phalanx wrote loaded by `tokenizers`, is checked by
benchmarks/tokenizer_speed.py, which compares the ids of a whole text.
"""

import json
import pathlib
import random
import struct
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenizer_families import FAMILIES, LLAMA3, PROSE
from tokenizer_families import texts as family_texts

ROOT = pathlib.Path(__file__).resolve().parent.parent


def documents():
    paths = ["LICENSE", "phalanx/comm/communicator.h", "phalanx/comm/types.h", "phalanx/base/log.cc", "CMakeLists.txt"]
    texts = [(ROOT / path).read_text() for path in paths]
    texts.append(PROSE * 3)
    texts.append("".join(" " * (i % 37) + "-" * (i % 23) + "=" * (i % 11) + "a" * (i % 17) + "\n" for i in range(300)))
    texts.append("".join("\t" * (i % 5) + f"x{i} = y_{i * 7 % 13}[{i}];  // {i:08b}\r\n" for i in range(200)))
    return texts


def samples():
    rng = random.Random(20240607)
    texts = ["", " ", "  ", "\n", " \n ", "\t\t\n\n  x", "Hello world", "Hello  world ", "don't DON'T 'twas we're'll",
             "'s't're've'm'll'd", "''s 's ' s", "a'b'c'd", "<|endoftext|>", "a<|endoftext|>b", "<|endoftext|><|endoftext|>",
             "<|endoftext| >", "<|endof<|endoftext|>text|>", " <|endoftext|> ", "x" * 300, " " * 300, "ab" * 200,
             "-" * 130 + " " * 77 + "=" * 65, "\u00a0\u2003\u3000x\u0085y\u180ez", "a\u0301e\u0308", "\ufeffBOM", "\u200b\u200d",
             "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "٣٤ ½⅓ Ⅻ", "\U0001F600\U0001F601", "\u0000\u0001\u007f", "\uffff\U0010ffff", "1234567 12 3", "ꟑꟓꟕ\U0001df00"]
    texts += PROSE.splitlines()
    texts += [line for text in documents()[:5] for line in text.splitlines()[::9]][:120]
    pools = ["abcdefghijklmnopqrstuvwxyz", "ABCdef 0123456789", " \t\n\r\u00a0\u2028", "'stremvdl ", "!?.,;:-_=+*/()[]{}<>|&%$#@",
             "äöüßéèçñø", "абвгд ЖЗИ", "漢字かなカナ한글", "😀🎉❤️👍🏽", "\u0301\u0308\u200d\ufe0f", "०१२३ ٣٤٥ ½²"]
    for _ in range(250):
        mix = rng.sample(pools, rng.randint(1, 4))
        texts.append("".join(rng.choice(rng.choice(mix)) for _ in range(rng.randint(1, 60))))
    for _ in range(80):  # any characters at all
        points = [rng.choice([rng.randrange(0x80), rng.randrange(0x800), rng.randrange(0x10000), rng.randrange(0x30000)])
                  for _ in range(rng.randint(1, 25))]
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
    return texts


def train(pre_tokenizer, vocab_size, texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def encoded(tokenizer, texts):
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def write_golden():
    texts, cases = documents(), samples()
    gpt2 = train(pre_tokenizers.ByteLevel(add_prefix_space=False), 1500, texts)
    llama3 = train(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), 600, texts)
    llama3.model.ignore_merges = True
    llama3.add_tokens([AddedToken("<tool", normalized=True), AddedToken("<tool_call>", normalized=True)])
    tool_cases = cases[:60] + ["<tool", "<tool_call>x<tool", "a<tool_<|endoftext|>call>"]
    golden = {
        "documents": texts,
        "gpt2": {"tokenizer": json.loads(gpt2.to_str()), "ids": encoded(gpt2, cases)},
        "samples": cases,
        "llama3": {"tokenizer": json.loads(llama3.to_str()), "samples": tool_cases, "ids": encoded(llama3, tool_cases)},
    }
    write("tokenizer_golden.json", golden)


def hash_of(data):
    """32-bit FNV-1a; tokenizer_families_test.cc has it too."""
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def fingerprint(tokenizer, text):
    """Six digits for the ids with and without special tokens, and the text decoded from the latter."""
    ids, plain = tokenizer.encode(text).ids, tokenizer.encode(text, add_special_tokens=False).ids
    data = struct.pack(f"<{len(ids) + len(plain)}i", *ids, *plain) + tokenizer.decode(plain, skip_special_tokens=False).encode()
    return f"{hash_of(data):08x}"[:6]


def write_families():
    cases = family_texts(400)
    golden = {"samples": cases}
    for name, make in FAMILIES.items():
        tokenizer = make()
        golden[name] = {"tokenizer": json.loads(tokenizer.to_str()), "hashes": "".join(fingerprint(tokenizer, t) for t in cases)}
    write("tokenizer_families.json", golden)


def write(name, golden):
    path = ROOT / "phalanx" / "data" / "testdata" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{path}: {path.stat().st_size} bytes, {len(golden['samples'])} texts")


def main():
    wanted = sys.argv[1:] or ["golden", "families"]
    if "golden" in wanted:
        write_golden()
    if "families" in wanted:
        write_families()


if __name__ == "__main__":
    main()
