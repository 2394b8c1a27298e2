#!/usr/bin/env python3
"""Runs the commands in a recipe's first comment and compares what they print with the lines below them.

    check_output.py SOURCE --path FOLDER [--path FOLDER ...] [--append "ARGUMENTS"]
    check_output.py SOURCE --printed FILE          # what its command has printed already: a job script's output

In the comment a command begins with "$ "; its output follows, up to an empty line or the next command. Of a page
(SOURCE.md) these are indented lines; empty ones belong to the output, and the command may be a pipeline. Each of the
--path folders holds programs; recipes/SCRIPT is found in this repository. --append adds arguments to each command.
In the output <word>, with spaces around it, stands for one word, and anything else in < > for any text; no line may
have nothing else. Text and whole numbers must be equal, but for counts of right answers. A number with a point, and
such a count, may differ by --tolerance of it (1 %), or by 2 in its last digit. What depends on the machine is any
number: times, rates and their ratios (before a unit such as ms, after "speed-up"), and rounding errors (written with an
exponent). A comment may abridge: its line "..." stands for any number of lines. Then recipes/expected/NAME.txt has the
whole output of its commands, which is compared, too. There "* " before a line means that it comes any number of times.
"""
import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

from output_lines import ANY_TEXT, commands_of, first_difference, output_matches, self_test

SKIPPED = 77
FOLDER = pathlib.Path(__file__).resolve().parent


def expected_of(source):
    """[(command, [(the file, the lines that it prints)])], by the recipe itself and by its file in expected/."""
    commands = commands_of(source.read_text(), source.suffix)
    if not any(lines for _, lines in commands):
        sys.exit(f"{source}: no command with its output in the first comment")
    if any(not ANY_TEXT.sub("", line).strip() for _, lines in commands for line in lines):
        sys.exit(f"{source}: a line is nothing but < >, which is any line")
    file = FOLDER / "expected" / f"{source.stem}.txt"
    in_full = dict(commands_of(file.read_text(), ".txt")) if file.exists() else {}
    if file.exists() and set(in_full) != {command for command, _ in commands}:
        sys.exit(f"{file}: expected the commands of {source}")
    more = {command: [(file, lines)] for command, lines in in_full.items()}
    return [(command, [(source, lines), *more.get(command, [])]) for command, lines in commands]


def quoted(line):
    return "no line" if line is None else f'"{line}"'


def problem_of(printed, expected, tolerance):
    found = [line for line in printed.splitlines() if line.strip()]
    for file, lines in expected:
        if not output_matches(lines, found, tolerance):
            missing, instead = first_difference(lines, found, tolerance)
            return (f"expected, by {file}:\n" + "\n".join(lines) +
                    f"\nfirst difference: expected {quoted(missing)}; found {quoted(instead)}")
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("--path", action="append", default=[], type=pathlib.Path)
    parser.add_argument("--append", default="")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--printed", type=pathlib.Path)
    arguments = parser.parse_args()
    commands = expected_of(arguments.source)
    if arguments.printed:
        printed = arguments.printed.read_text(errors="replace")
        problems = (problem_of(printed, expected, arguments.tolerance) for _, expected in commands)
        sys.exit("\n".join(filter(None, problems)) or None)
    path = os.pathsep.join([*(str(folder.resolve()) for folder in arguments.path), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for command, expected in commands:
            words = shlex.split(command, comments=True) + shlex.split(arguments.append)
            words = ["bash", "-euo", "pipefail", "-c", command] if arguments.source.suffix == ".md" else words
            if words[0].startswith("recipes/"):
                words[0] = str(FOLDER.parent / words[0])
            # A script's lines are those of its programs, some of which go to standard error.
            errors = subprocess.STDOUT if arguments.source.suffix == ".sh" else None
            run = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                                 errors="replace", check=False)
            print(f"$ {command}\n{run.stdout}", flush=True)
            if run.returncode == SKIPPED:
                sys.exit(SKIPPED)
            if run.returncode != 0:
                sys.exit(f"status {run.returncode}; expected 0")
            if problem := problem_of(run.stdout, expected, arguments.tolerance):
                sys.exit(problem)


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        main()
