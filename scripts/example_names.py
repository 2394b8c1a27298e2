#!/usr/bin/env python3
"""The examples of headers name what there is: every type, function and member in them stands in the code, too.

    scripts/example_names.py [--self-test]

scripts/snippets.py compiles the examples of public headers. Those of internal headers need too many objects around them
for that; this finds names that have been changed or removed. tests/snippets/stand_ins.txt lists names that stand for a
user's own code.
"""
import argparse
import pathlib
import re
import sys

import snippets

STAND_INS = "tests/snippets/stand_ins.txt"


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


def names_in(lines):
    """What is called, made or accessed, and what is spelt like a type."""
    text = re.sub(r'"[^"\n]*"', '""', without_comments("\n".join(lines)))
    own = set(re.findall(r"\b(?:[A-Z][\w:<>]*|auto)[&*]* (\w+)[({]", text))  # variables
    return {name for pattern in (r"\b([A-Za-z_]\w+)\s*[({]", r"\b([A-Z][a-z]\w+)\b", r"[.>]\s*([A-Za-z_]\w*)") for name in re.findall(pattern, text)} - own


def stand_ins():
    allowed = {}
    for line in (snippets.ROOT / STAND_INS).read_text().splitlines():
        if line and not line.startswith("#"):
            path, _, names = line.partition(": ")
            allowed[path] = set(names.split())
    return allowed


def problems(files, allowed):
    """`files`: name -> text, of the library and the programs."""
    known = set()
    for text in files.values():
        known |= set(re.findall(r"\w+", without_comments(text)))
    unused = {(file, name) for file, names in allowed.items() for name in names}
    for file, text in files.items():
        if not file.endswith(".h"):
            continue
        for block in snippets.blocks_of_header(file, text):
            if block.lines[0].startswith("- "):  # prose, by chance with a semicolon at the end of a line
                continue
            missing = names_in(block.lines) - known
            unused -= {(file, name) for name in missing}
            for name in sorted(missing - allowed.get(file, set())):
                yield (f"{block.where}: its example names '{name}', and no code does: name what there is, or, if it stands for a user's "
                       f"own code, list it in {STAND_INS}")
    for file, name in sorted(unused):
        yield f"{STAND_INS}: no example of {file} needs '{name}'"


def sources():
    paths = [path for folder in ("phalanx", "cli") for path in sorted((snippets.ROOT / folder).rglob("*"))]
    return {str(path.relative_to(snippets.ROOT)): path.read_text() for path in paths if path.suffix in {".h", ".cc", ".inc", ".cu"}}


def self_test():
    header = "//   Thing thing(own());\n//   thing.gone(); // never\n\nclass Thing {};"
    found = list(problems({"a.h": header}, {"a.h": {"own", "idle"}}))
    snippets.expect([text.partition(":")[0] + text.partition("'")[2].partition("'")[0] for text in found],
                    ["a.hgone", f"{STAND_INS}idle"])
    print("example_names: self-test passed")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--self-test", action="store_true")
    if parser.parse_args().self_test:
        return self_test()
    found = list(problems(sources(), stand_ins()))
    for problem in found:
        print(f"example_names: {problem}", file=sys.stderr)
    if found:
        sys.exit(1)
    print("example_names: every name in the examples of headers is one of the code")


if __name__ == "__main__":
    main()
