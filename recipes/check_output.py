#!/usr/bin/env python3
"""Runs the commands in a recipe's first comment and compares what they print with the lines below them.

    check_output.py SOURCE --path FOLDER [--path FOLDER ...] [--append "ARGUMENTS"]

In the comment a command begins with "$ "; its output follows, up to an empty line or the next command. Of a page
(SOURCE.md) these are indented lines; empty ones belong to the output, and the command may be a pipeline. Each of the
--path folders holds programs; recipes/SCRIPT is found in this repository. --append adds arguments to each command.
A line "..." stands for any number of lines; <word>, with spaces around it, for one word, and anything else in < > for
any text; no line may have nothing else. Text and whole numbers must be equal, but for counts of right answers. A
number with a point, and such a count, may differ by --tolerance of it (1 %), or by 2 in its last digit. What depends on
the machine is any number: times, rates and their ratios (before a unit such as ms, after "speed-up"), and rounding
errors (written with an exponent).
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
ONE_WORD = re.compile(r"(?<!\S)<[^<> ]+>(?!\S)")
ANY_UNIT = re.compile(r" ?(ms|s|seconds|us|tokens/s|.?B/s|x the|times)\b")


def commands_of(text, ending):
    """[(command, expected lines)]"""
    found, lines, mark = [], None, {".md": "    ", ".cc": "//"}.get(ending, "#")
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if ending == ".md" and not line.startswith(mark):
            lines = lines if not line else None
            continue
        if not line.startswith(mark):
            break
        text = line.removeprefix(mark).strip()
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


def pattern_of(expected):
    """A regular expression with a group for each number outside of < >, and where these numbers stand in the line."""
    pattern, numbers, end = "", [], 0
    for part in re.finditer(f"{ANY_TEXT.pattern}|{NUMBER.pattern}", expected):
        is_number = part[0][0] != "<"
        numbers += [part] if is_number else []
        any_text = r"\S+" if ONE_WORD.match(expected, part.start()) else ".+"
        pattern += re.escape(expected[end:part.start()]) + (f"({NUMBER.pattern})" if is_number else any_text)
        end = part.end()
    return pattern + re.escape(expected[end:]), numbers


def line_matches(expected, found, tolerance):
    expected, found = " ".join(expected.split()), " ".join(found.split())
    pattern, numbers = pattern_of(expected)
    match = re.fullmatch(pattern, found)
    for a, b in zip(numbers, match.groups() if match else ()):
        is_measured = ANY_UNIT.match(expected, a.end()) or expected[: a.start()].endswith("speed-up ")
        if is_measured or "e" in a[0] or "e" in b:
            continue
        may_differ = "Accuracy" in expected[: a.start()] or ("." in a[0] and "." in b)
        if a[0] != b and not (may_differ and is_close(a[0], b, tolerance)):
            return False
    return match is not None


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
    commands = commands_of(arguments.source.read_text(), arguments.source.suffix)
    if not any(expected for _, expected in commands):
        sys.exit(f"{arguments.source}: no command with its output in the first comment")
    if any(not ANY_TEXT.sub("", line).strip() for _, expected in commands for line in expected):
        sys.exit(f"{arguments.source}: a line is nothing but < >, which is any line")
    path = os.pathsep.join([*(str(folder.resolve()) for folder in arguments.path), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for command, expected in commands:
            words = shlex.split(command, comments=True) + shlex.split(arguments.append)
            words = ["bash", "-euo", "pipefail", "-c", command] if arguments.source.suffix == ".md" else words
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
    assert output_matches(["a <us> <GB/s> 0 <%>"], ["a 3.1 9 0 17"])
    assert not output_matches(["a <us> <GB/s> 0 <%>"], ["a 3.1 9 2 0 17"])
    assert output_matches(["<any one>: 1.50"], ["b c: 1.51"]) and not output_matches(["<any one>: 1.50"], ["b: 1.54"])
    page = commands_of("$ no\n\n    $ a --b \\\n        --c | d\n    one\n\n      two\n\nthree\n\n    four\n", ".md")
    assert page == [("a --b  --c | d", ["one", "two"])], page
    accuracy = ["Accuracy: 530/534 (99%)"]
    assert output_matches(accuracy, ["Accuracy: 526/534 (98%)"]) and not output_matches(accuracy, ["Accuracy: 500/534 (99%)"])


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        main()
