#!/usr/bin/env python3
"""Runs the commands in a recipe's first comment and compares what they print with the lines below them.

    check_output.py SOURCE --path FOLDER [--path FOLDER ...] [--append "ARGUMENTS"]

In the comment a command begins with "$ "; its output follows, up to an empty line or the next command. Each of the
--path folders holds programs; recipes/SCRIPT is found in this repository. --append adds arguments to each command. A
line "..." stands for any number of lines, and what stands in < > for any text. Text and whole numbers must be equal, but
for counts of right answers. A number with a point, and such a count, may differ by --tolerance of it (1 %), or by 2 in
its last digit. What depends on the machine is any number: times, rates and their ratios (before a unit such as ms, after
"speed-up"), and rounding errors (written with an exponent).
"""
import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

SKIPPED = 77
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]\d+)?")
ANY_TEXT = re.compile(r"<[^<>]+>")
ANY_UNIT = re.compile(r" ?(ms|s|seconds|us|tokens/s|.?B/s|x the|times)\b")


def commands_of(source):
    """[(command, expected lines)]"""
    found, lines, comment = [], None, "#" if source.suffix in (".sh", ".sbatch") else "//"
    for line in source.read_text().splitlines():
        if not line.startswith(comment):
            break
        text = line.removeprefix(comment).strip()
        if text.startswith("$ "):
            lines = []
            found.append((text[2:], lines))
        elif not text:
            lines = None
        elif lines is not None:
            lines.append(text)
    return found


def is_close(expected, found, tolerance):
    places = len(expected.partition(".")[2])
    difference = abs(float(expected) - float(found))
    return difference <= max(2.001 * 10**-places, tolerance * abs(float(expected)))


def line_matches(expected, found, tolerance):
    expected, found = " ".join(expected.split()), " ".join(found.split())
    if ANY_TEXT.search(expected):
        return re.fullmatch(".+".join(re.escape(part) for part in ANY_TEXT.split(expected)), found) is not None
    if NUMBER.sub("0", expected) != NUMBER.sub("0", found):
        return False
    for a, b in zip(NUMBER.finditer(expected), NUMBER.finditer(found)):
        is_measured = ANY_UNIT.match(expected, a.end()) or expected[: a.start()].endswith("speed-up ")
        if is_measured or "e" in a[0] or "e" in b[0]:
            continue
        may_differ = "Accuracy" in expected[: a.start()] or ("." in a[0] and "." in b[0])
        if a[0] != b[0] and not (may_differ and is_close(a[0], b[0], tolerance)):
            return False
    return True


def output_matches(expected, found, tolerance=0.01):
    if not expected:
        return not found
    if expected[0] == "...":
        return any(output_matches(expected[1:], found[i:], tolerance) for i in range(len(found) + 1))
    if not found or not line_matches(expected[0], found[0], tolerance):
        return False
    return output_matches(expected[1:], found[1:], tolerance)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("--path", action="append", default=[], type=pathlib.Path)
    parser.add_argument("--append", default="")
    parser.add_argument("--tolerance", type=float, default=0.01)
    arguments = parser.parse_args()
    commands = commands_of(arguments.source)
    if not any(expected for _, expected in commands):
        sys.exit(f"{arguments.source}: no command with its output in the first comment")
    path = os.pathsep.join([*(str(folder.resolve()) for folder in arguments.path), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for command, expected in commands:
            words = shlex.split(command, comments=True) + shlex.split(arguments.append)
            if words[0].startswith("recipes/"):
                words[0] = str(pathlib.Path(__file__).resolve().parent.parent / words[0])
            # A script's lines are those of its programs, some of which go to standard error.
            errors = subprocess.STDOUT if arguments.source.suffix == ".sh" else None
            run = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                                 errors="replace", check=False)
            found = [line for line in run.stdout.splitlines() if line.strip()]
            print(f"$ {command}\n{run.stdout}", flush=True)
            if run.returncode == SKIPPED:
                sys.exit(SKIPPED)
            if run.returncode != 0:
                sys.exit(f"status {run.returncode}; expected 0")
            if not output_matches(expected, found, arguments.tolerance):
                sys.exit(f"expected, by {arguments.source}:\n" + "\n".join(expected))


def self_test():
    assert output_matches(["a 1.50, 2", "...", "z"], ["a 1.51, 2", "b", "z"])
    assert output_matches(["a 1.50"], ["a 1.51"]) and not output_matches(["a 1.50"], ["a 1.54"])
    assert not output_matches(["a 100"], ["a 101"]) and not output_matches(["a"], ["a", "b"])
    assert not output_matches(["a", "b"], ["a"]) and not output_matches(["the same"], ["NOT the same"])
    assert output_matches(["2.5 ms, 1.1 x the a, by 1.0e-07"], ["9.7 ms, 2.9 x the a, by 0.0e+00"])
    assert not output_matches(["loss 1.5, 2"], ["loss nan, 2"])
    assert output_matches(["  <2> of <3 CPUs>, all"], ["4 of 8 CPUs (a quota), all"])
    assert not output_matches(["<2> of <3>, all"], ["4 of 8"]) and not output_matches(["L1 <48 KiB>"], ["L2 48 KiB"])
    accuracy = ["Accuracy: 530/534 (99%)"]
    assert output_matches(accuracy, ["Accuracy: 526/534 (98%)"]) and not output_matches(accuracy, ["Accuracy: 500/534 (99%)"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        main()
