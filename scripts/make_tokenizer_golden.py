"""Writes phalanx/data/testdata/tokenizer_golden.json: what the `tokenizers` package does with some texts.

The file holds training documents, the tokenizer.json that `tokenizers` trains from them (GPT-2's split pattern, and
Llama 3's with ignore_merges) and the ids of varied strings. The tests compare Phalanx with it and need no Python.

    python scripts/make_tokenizer_golden.py

The other direction, a tokenizer.json that Phalanx wrote loaded by `tokenizers`, is checked by
benchmarks/tokenizer_speed.py, which compares the ids of a whole text.
"""

import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PROSE = """The quick brown fox jumps over the lazy dog. It's what they've said we'll do, isn't it? I'm sure you'd agree.
Les élèves français mangent à midi; où est la bibliothèque? Straße, Äpfel, Öl, über, naïve, façade, coöperate.
Быстрая коричневая лиса прыгает через ленивую собаку. Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.
敏捷的棕色狐狸跳过了懒狗。素早い茶色の狐がのろまな犬を飛び越える。빠른 갈색 여우가 게으른 개를 뛰어넘는다.
الثعلب البني السريع يقفز فوق الكلب الكسول. השועל החום המהיר קופץ מעל הכלב העצלן. तेज भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।
Numbers: 0 1 12 123 1234 12345 3.14159 1,000,000 ١٢٣ ½ Ⅷ ²³ ४५६ and emoji 😀 👩‍👩‍👧‍👦 🇩🇪 ❤️ ✨.
"""


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


def main():
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
    path = ROOT / "phalanx" / "data" / "testdata" / "tokenizer_golden.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(f"{path}: {path.stat().st_size} bytes, {len(cases)} texts")


if __name__ == "__main__":
    main()
