"""Phalanx's tokenizers against the `tokenizers` package: ids with and without special tokens, and the text decoded from
them, of thousands of strings for every kind of tokenizer_families.py.

    python scripts/compare_tokenizers.py --program build/release/bin/tokenizer_speed --count 5000 --seed 1
    python scripts/compare_tokenizers.py --program build/release/bin/tokenizer_speed --code-points

The second form tries every code point there is, between letters, and prints those that differ: the characters that the
libraries (PCRE2, utf8proc) know from another version of Unicode than the package.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unicodedata

from tokenizer_families import FAMILIES, texts


def ours(program, folder, tokenizer, strings):
    paths = [str(pathlib.Path(folder) / name) for name in ("strings.json", "tokenizer.json", "out.json")]
    pathlib.Path(paths[0]).write_text(json.dumps(strings))
    pathlib.Path(paths[1]).write_text(tokenizer.to_str())
    subprocess.run([program, paths[0], "--strings", paths[1], paths[2]], check=True)
    return json.loads(pathlib.Path(paths[2]).read_text())


def theirs(tokenizer, strings):
    out = []
    for text in strings:
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        out.append({"ids": tokenizer.encode(text).ids, "plain": plain, "text": tokenizer.decode(plain, skip_special_tokens=False)})
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--code-points", action="store_true")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    arguments = parser.parse_args()
    if arguments.code_points:
        points = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) != "Co"]
        strings = [f"a{chr(c)}b{chr(c)}\u0301 {chr(c)}" for c in points]
    else:
        strings = texts(arguments.count, arguments.seed)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.families:
            tokenizer = FAMILIES[name]()
            found, expected = ours(arguments.program, folder, tokenizer, strings), theirs(tokenizer, strings)
            differ = [i for i in range(len(strings)) if found[i] != expected[i]]
            print(f"{name:18} {len(strings)} strings, {sum(len(e['ids']) for e in expected)} ids, {len(differ)} differ")
            for i in differ[:None if arguments.code_points else 5]:
                if arguments.code_points:
                    print(f"    U+{points[i]:04X} {unicodedata.name(chr(points[i]), '?')}")
                else:
                    print(f"    {strings[i]!r}\n      Phalanx {found[i]}\n      package {expected[i]}")
            failed += len(differ)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
