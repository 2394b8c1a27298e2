"""Writes phalanx/data/tokenizer/unicode_ranges.inc: the code points that `tokenizers` takes as letters, numbers and spaces.

The classes \\p{L}, \\p{N} and \\s of a split pattern depend on the Unicode version; asking the package itself makes the
ids the same as its own. Run where `tokenizers` is installed: python scripts/make_unicode_ranges.py
"""

import pathlib

from tokenizers import Regex, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def members(pattern):
    """Code points that match: those that a Split which removes matches removes."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    kept = set()
    for at in range(0, len(CODE_POINTS), 4096):
        for piece, _ in split.pre_tokenize_str("".join(map(chr, CODE_POINTS[at : at + 4096]))):
            kept.update(map(ord, piece))
    return [c for c in CODE_POINTS if c not in kept]


def ranges(code_points):
    out = []
    for c in code_points:
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def main():
    lines = ["// Made by scripts/make_unicode_ranges.py: first and last code point of each range, ascending.", "// clang-format off"]
    for name, pattern in (("kLetterRanges", r"\p{L}"), ("kNumberRanges", r"\p{N}"), ("kSpaceRanges", r"\s")):
        found = ranges(members(pattern))
        lines.append(f"constexpr CodePointRange {name}[] = {{")
        for at in range(0, len(found), 6):
            lines.append("    " + " ".join(f"{{0x{a:X}, 0x{b:X}}}," for a, b in found[at : at + 6]))
        lines.append("};")
    lines.append("// clang-format on")
    path = pathlib.Path(__file__).resolve().parent.parent / "phalanx" / "data" / "unicode_ranges.inc"
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(lines)} lines")


if __name__ == "__main__":
    main()
