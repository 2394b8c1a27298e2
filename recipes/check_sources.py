#!/usr/bin/env python3
"""Checks the sources of the recipes: each file has fewer than 150 lines and names no device, because what a recipe uses
is the device of its context. Each program has its row in README.md and the common command line; each program and script,
job scripts too, has the output of a command in its first comment. The lecture's table names the rows of README.md."""
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


def main():
    self_test()
    readme = (FOLDER / "README.md").read_text()
    files = sorted(file for ending in ("cc", "h", "sh", "py") for file in FOLDER.glob(f"*.{ending}"))
    files += sorted((FOLDER / "slurm").glob("*.sbatch"))
    faults = [f"{file.name} {fault}" for file in files for fault in faults_of(file.name, file.read_text(), readme)]
    faults += row_faults(readme, (FOLDER.parent / "phalanx" / "lecture" / "text" / "table.txt").read_text())
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
