#!/usr/bin/env python3
"""Checks the sources of the recipes: each file has fewer than 150 lines and names no device, because what a recipe uses
is the device of its context. Each program has its row in README.md and the common command line; each program and
script, job scripts too, has the output of a command in its first comment. Where the comment leaves lines out ("..."),
expected/ has all of them, and comment and README.md say so. The lecture's table names the rows of README.md."""
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
DEVICE = re.compile(r'\bk(CPU|CUDA)\b|"(cpu|cuda)"|\.cuda\(|at::Device\(|DeviceType::')
NO_PROGRAMS = {"recipe.cc", "losses.cc", "join_ranks.cc", "traced_stream_test.cc", "small_model.sh"}


def faults_of(name, text, readme):
    if (count := len(text.splitlines())) >= 150:
        yield f"has {count} lines: expected fewer than 150"
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//"))
    found = DEVICE.search(code)
    if found and name.endswith((".cc", ".h")) and name != "traced_stream_test.cc":  # it simulates one
        yield f"names the device {found[0]}: expected that of the context"
    if name in NO_PROGRAMS:
        return
    if name.endswith((".sh", ".sbatch")) and "#   $ " not in text:
        yield "has no command with its output in its first comment"
    if not name.endswith(".cc"):
        return
    if f"]({name})" not in readme:
        yield "has no row in README.md"
    if "recipe::Program" not in code:
        yield "does not use recipe::Program"
    if "//   $ " not in text:
        yield "has no command with its output in its first comment"


def abridged_faults(name, text, readme, in_full):
    """`in_full` is the text of its file in expected/, or None."""
    stem = pathlib.PurePath(name).stem
    is_abridged = re.search(r"^(//|#) +\.\.\.$", text, re.MULTILINE) is not None
    if is_abridged != (in_full is not None):
        yield f"leaves out {'lines, and there is no' if is_abridged else 'no line, and there is'} expected/{stem}.txt"
    if in_full is None:
        return
    if re.search(r"^ *\.\.\.$", in_full, re.MULTILINE):
        yield f"leaves out lines in expected/{stem}.txt"
    if f"recipes/expected/{stem}.txt" not in text:
        yield f"does not say that recipes/expected/{stem}.txt has all lines"
    if f"](expected/{stem}.txt)" not in readme:
        yield f"has no link to expected/{stem}.txt in README.md"


def row_faults(readme, table):
    """Rows of README.md that the lecture's table leaves out, and those that it alone has."""
    rows = set(re.findall(r"^\| ([A-D]\d+) \|", readme, re.MULTILINE))
    named = set(re.findall(r"\b[A-D]\d+\b", table))
    for row in sorted(rows ^ named):
        yield f"{row} is in {'README.md' if row in rows else 'the table of the lecture'} only"


def self_test():
    assert list(row_faults("| A1 | x |\n| B2 | y |\n", "|why|A1, B3|\n")) == [
        "B2 is in README.md only", "B3 is in the table of the lecture only"]
    good = "//   $ a\n#include <a>\nrecipe::Program p;\n"
    assert not list(faults_of("a.cc", good, "[a](a.cc)"))
    for name, text in [("b.cc", good), ("a.cc", good.replace("$", "")), ("a.cc", good + "x(at::kCPU);"),
                       ("a.cc", good + 'x({.device = "cpu"});'), ("a.cc", good + "\n" * 150), ("a.cc", "//   $ a\n"),
                       ("a.sh", "#   $ a\n" * 150), ("a.sbatch", "#\n")]:
        assert len(list(faults_of(name, text, "[a](a.cc)"))) == 1, (name, text)


    whole, link = "# in recipes/expected/b.txt\n#   ...\n", "[all](expected/b.txt)"
    assert not list(abridged_faults("b.sbatch", whole, link, "$ b\nc\n"))
    assert not list(abridged_faults("b.sh", "#   $ b\n#   c\n", "", None))
    for text, row, in_full in [(whole, link, None), ("#   c\n# recipes/expected/b.txt\n", link, "c\n"),
                               ("//   ...\n", link, "c\n"), (whole, "", "c\n"), (whole, link, "c\n  ...\n")]:
        assert len(list(abridged_faults("b.sh", text, row, in_full))) == 1, (text, row, in_full)


def main():
    self_test()
    readme = (FOLDER / "README.md").read_text()
    files = sorted(file for ending in ("cc", "h", "sh", "py") for file in FOLDER.glob(f"*.{ending}"))
    files += sorted((FOLDER / "slurm").glob("*.sbatch"))
    faults = [f"{file.name} {fault}" for file in files for fault in faults_of(file.name, file.read_text(), readme)]
    in_full = {file.stem: file.read_text() for file in (FOLDER / "expected").iterdir()}
    for file in files:
        if file.suffix not in (".h", ".py"):
            faults += [f"{file.name} {fault}" for fault in
                       abridged_faults(file.name, file.read_text(), readme, in_full.pop(file.stem, None))]
    faults += [f"expected/{stem}.txt belongs to no recipe" for stem in in_full]
    faults += row_faults(readme, (FOLDER.parent / "phalanx" / "lecture" / "text" / "table.txt").read_text())
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
