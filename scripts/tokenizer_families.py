"""Small tokenizers of the kinds that real models have, made and trained by the `tokenizers` package, and varied texts.

Used by make_tokenizer_golden.py and compare_tokenizers.py. The vocabularies are small; the structure around them
(normalizer, pre-tokenizer, flags of the model, template, decoder) is that of the families' own tokenizer.json files.
"""

import json
import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

PROSE = """The quick brown fox jumps over the lazy dog. It's what they've said we'll do, isn't it? I'm sure you'd agree.
Les élèves français mangent à midi; où est la bibliothèque? Straße, Äpfel, Öl, über, naïve, façade, coöperate.
Быстрая коричневая лиса прыгает через ленивую собаку. Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.
敏捷的棕色狐狸跳过了懒狗。素早い茶色の狐がのろまな犬を飛び越える。빠른 갈색 여우가 게으른 개를 뛰어넘는다.
الثعلب البني السريع يقفز فوق الكلب الكسول. השועל החום המהיר קופץ מעל הכלב העצלן. तेज भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।
Numbers: 0 1 12 123 1234 12345 3.14159 1,000,000 ١٢٣ ½ Ⅷ ²³ ४५६ and emoji 😀 👩‍👩‍👧‍👦 🇩🇪 ❤️ ✨.
"""
CODE = "def f(x, *args):\n\treturn [x[i] * 0.5 for i in range(10)]  # half of it\r\n    if a >= b && c != d { y += 1; }\n"
POOLS = ["abcdefghijklmnopqrstuvwxyz", "ABCdef 0123456789", " \t\n\r\u00a0\u2028\u3000", "'stremvdl ", "!?.,;:-_=+*/()[]{}<>|&%$#@",
         "äöüßéèçñøİſ", "абвгд ЖЗИ", "漢字かなカナ한글", "😀🎉❤️👍🏽", "\u0301\u0308\u0327\u200d\ufe0f", "०१२३ ٣٤٥ ½²Ⅷ①", "▁ ▁_",
         "ﬁﬀＡＢ㍿ÅΩé", "각ᄀ" + "ᅡᆨ", "\u0344\u0958\u2126\u212b\u1e9b\u0323"]
MARKS = ["<s>", "</s>", "<unk>", "<0x41>", "<|endoftext|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "[INST]", "<tool>",
         " <tool>  ", "word", " word ", "words", "<pad>", "<mask>", "  <mask>\n x"]


def words(rng):
    return " ".join("".join(rng.choice("etaoinshrdlu") for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(1, 12)))


def texts(count, seed=20240607):
    """`count` varied strings, the same for the same seed."""
    rng = random.Random(seed)
    out = ["", " ", "  ", "\n", " \n ", "\t\t\n\n  x", "Hello world", "Hello  world ", " Hello", "▁Hello", "▁ x", "don't DON'T 'ſ we're'll",
           "''s 's ' s", "a'b'c'd", "<s>", "<s>Hello</s>", "<s> Hello</s> x", "<|endoftext| >", "<|im_start|>user\nHi<|im_end|>\n",
           "a<mask>b", "a <mask> b", "aword word wordb", "x" * 90, " " * 70, "ab" * 60, "a\u0301e\u0308", "\ufeffBOM", "\u200b\u200d", "𝔘𝔫𝔦 𝟙𝟚",
           "\u0000\u0001\u007f", "\uffff\U0010ffff", "1234567 12 3", "Å Å Å", "각 각", "ﬁ Ⅷ ㍿", "İSTANBUL ΣΑΣ"]
    out += [line[:70] for line in (PROSE + CODE).splitlines()]
    while len(out) < count:
        kind = rng.randrange(5)
        if kind == 0:
            out.append(words(rng))
        elif kind == 1:  # any characters at all
            points = [rng.choice([rng.randrange(0x80), rng.randrange(0x800), rng.randrange(0x3100), rng.randrange(0x10000)])
                      for _ in range(rng.randint(1, 14))]
            # Of an old Unicode, which PCRE2, utf8proc and the package all know.
            out.append("".join(chr(p) for p in points if unicodedata.ucd_3_2_0.category(chr(p)) not in ("Cn", "Cs")))
        elif kind == 2:  # marks between words
            out.append("".join(rng.choice([rng.choice(MARKS), rng.choice(MARKS), words(rng)[:9], " ", "x", "\n"])
                               for _ in range(rng.randint(1, 7))))
        else:
            mix = rng.sample(POOLS, rng.randint(1, 4))
            out.append("".join(rng.choice(rng.choice(mix)) for _ in range(rng.randint(1, 40))))
    return out[:count]


def corpus():
    rng = random.Random(5)
    return [PROSE + CODE] * 3 + [words(rng) for _ in range(200)]


_training = {}  # other texts and size than the golden files', for benchmarks


def train_on(texts, vocab_size):
    """From here on the tokenizers made are trained on these texts, to this size."""
    _training.update(texts=texts, size=vocab_size)


def trained(tokenizer, size, specials, byte_level, initial=()):
    tokenizer.train_from_iterator(_training.get("texts") or corpus(), trainers.BpeTrainer(
        vocab_size=_training.get("size", size), min_frequency=2, special_tokens=specials, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if byte_level else list(initial)))
    return tokenizer


def template(token, tokenizer, end=None):
    pieces = [token, "$A"] + ([end] if end else [])
    pair = pieces + [f"{token}:1", "$B:1"] + ([f"{end}:1"] if end else [])
    used = [token] + ([end] if end else [])
    return processors.TemplateProcessing(single=pieces, pair=pair, special_tokens=[(t, tokenizer.token_to_id(t)) for t in used])


def with_model(tokenizer, **settings):
    """The tokenizer with keys of its model set, as the families' files have them."""
    file = json.loads(tokenizer.to_str())
    file["model"].update(settings)
    return Tokenizer.from_str(json.dumps(file))


def gpt2():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    return trained(t, 600, ["<|endoftext|>"], True)


def llama3():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    trained(t, 600, [], True)
    t.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template("<|begin_of_text|>", t)])
    return with_model(t, ignore_merges=True)


def qwen():
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    trained(t, 600, [], True)
    t.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    t.add_tokens([AddedToken("<tool>", normalized=False)])
    return t


BYTES = [f"<0x{b:02X}>" for b in range(256)]


def sentencepiece(size=620, split=True):
    """A vocabulary of characters as SentencePiece makes it: <unk>, <s>, </s>, the bytes, then merges of words."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=split)
    trained(t, size, ["<unk>", "<s>", "</s>"] + BYTES, False)
    file = json.loads(t.to_str())
    # The bytes are ordinary tokens in these files.
    file["added_tokens"] = [token for token in file["added_tokens"] if not token["content"].startswith("<0x")]
    file["pre_tokenizer"] = None
    file["model"].update(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return Tokenizer.from_str(json.dumps(file))


LLAMA_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def llama2():
    t = sentencepiece()
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence(LLAMA_DECODER)
    t.post_processor = template("<s>", t)
    return t


def llama2_metaspace():
    t = sentencepiece()
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    t.decoder = decoders.Sequence(LLAMA_DECODER)
    t.post_processor = template("<s>", t, "</s>")
    t.add_tokens([AddedToken("[INST]", normalized=False)])
    return t


def mistral():
    t = sentencepiece()
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    t.decoder = decoders.Metaspace(prepend_scheme="always")
    t.post_processor = template("<s>", t)
    t.add_special_tokens(["[INST]"])
    return with_model(t, ignore_merges=True)


def gemma():
    t = sentencepiece()
    t.normalizer = normalizers.Replace(" ", "▁")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    t.post_processor = template("<s>", t)
    return t


def across_words():
    """Merges that join words, as a vocabulary trained on whole sentences has them."""
    t = sentencepiece(split=False)
    t.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return t


def unknown():
    """No byte fallback: unknown characters become <unk>, each its own; white space beside added tokens goes with them."""
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip(),
                                         normalizers.Replace(Regex(r"\s+"), " ")])
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Punctuation("contiguous"),
                                               pre_tokenizers.Metaspace(prepend_scheme="first")])
    t.decoder = decoders.Metaspace(prepend_scheme="first")
    trained(t, 300, ["<unk>", "<pad>"], False)
    t.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<tool>", rstrip=True)])
    t.add_tokens([AddedToken("word", single_word=True), AddedToken("FOX", normalized=True)])
    return t


def split_kinds():
    """Every behaviour of Split, on bytes, behind NFD."""
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Replace("ss", "ß")])
    split = pre_tokenizers.Split
    t.pre_tokenizer = pre_tokenizers.Sequence([
        split(Regex(r"\n+|^x"), "removed"), split(" ", "merged_with_next"), split(Regex(r"[,.;]"), "merged_with_previous"),
        split(Regex(r"\d"), "contiguous"), split(Regex(r"[a-z]+|\w"), "isolated", invert=True), split(Regex("(?=[A-Z])"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=True)])
    t.decoder = decoders.ByteLevel()
    return trained(t, 500, ["<s>"], True)


def fused():
    """Whitespace pieces, NFKD, fused unknown characters, the older Metaspace decoder."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    t.normalizer = normalizers.NFKD()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Whitespace(),
                                               pre_tokenizers.CharDelimiterSplit("_"), pre_tokenizers.Metaspace()])
    t.decoder = decoders.Metaspace()
    return trained(t, 300, ["<unk>"], False)


FAMILIES = {f.__name__: f for f in (gpt2, llama3, qwen, llama2, llama2_metaspace, mistral, gemma, across_words, unknown, split_kinds, fused)}
