#!/usr/bin/env python3
"""Runs every command that docs/lecture.md prints, as it is printed: each must end with status 0, all in five minutes.

    scripts/lecture_commands.py --path build/release/bin --path build/release/recipes [--page FILE] [--limit SECONDS]
    scripts/lecture_commands.py --self-test

Commands are the lines of blocks fenced with sh, and `phalanx COMMAND --option ...` in the text. Each runs in an empty
folder, with the programs of the --path folders in PATH and nothing to read. Two names stand for what a reader puts in:
HOST is here this machine, PROGRAM is lifecycle. A command with --nnodes N is started N times at once, as on N nodes.
"""
import argparse
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

from snippets import shell_lines

ROOT = pathlib.Path(__file__).resolve().parent.parent
LONGEST = 300  # seconds, all commands together


def commands_of(page):
    """(line, command), each once; names of commands in the text, without an option, are left out."""
    lines, found = page.splitlines(), {}
    for number, command in shell_lines(page):
        in_text = f"`{command}`" in lines[number - 1]
        if command and not (in_text and " -" not in command):
            found.setdefault(command, number)
    return [(number, command) for command, number in found.items()]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def as_here(command):
    """The command with this machine's names, and how often it is started."""
    nodes = re.search(r" --nnodes[ =](\d+)", command)
    here = re.sub(r"\bHOST:\d+", f"127.0.0.1:{free_port()}", command)
    return re.sub(r"\bPROGRAM\b", "lifecycle", here), int(nodes[1]) if nodes else 1


def run(command, path, seconds):
    """What went wrong, or None."""
    here, times = as_here(command)
    environment = {**os.environ, "PATH": os.pathsep.join([*path, os.environ["PATH"]])}
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        running = [subprocess.Popen(["bash", "-euo", "pipefail", "-c", here], cwd=folder, env=environment,
                                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                    start_new_session=True) for _ in range(times)]
        try:
            statuses = [process.wait(max(0.0, end - time.monotonic())) for process in running]
        except subprocess.TimeoutExpired:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, 9)
                    process.wait()
            return "is not done when the commands' time is over"
        if not any(statuses):
            return None
        output.seek(0)
        last = "".join(output.readlines()[-15:])
        return f"ended with status {max(statuses, key=abs)}; expected 0\n{last}"


def problems_of(page, path, limit=LONGEST):
    commands, begin = commands_of(page), time.monotonic()
    if not commands:
        yield "the page prints no command"
    for number, command in commands:
        begun = time.monotonic()
        problem = run(command, path, limit - (begun - begin))
        print(f"{time.monotonic() - begun:6.1f} s  {command}", flush=True)
        if problem:
            yield f"line {number}: {command}\n{problem}"
        if time.monotonic() - begin > limit:
            yield f"all commands together take more than {limit:g} s"
            return


def self_test():
    page = ("say `phalanx plan` and `phalanx doctor --topology`\n```sh\ntrue  # a remark\nprintf x \\\n  y\n```\n"
            "```bash\nfalse\n```\n```text\nfalse\n```\n")
    expected = [(1, "phalanx doctor --topology"), (3, "true  # a remark"), (4, "printf x y")]
    assert commands_of(page) == expected, commands_of(page)
    assert not list(problems_of("```sh\ntrue  # a remark\n```\n", []))
    for wrong in ("flase", "false", "true | false", "test -n \"$(cat)\"", "sleep 5"):
        is_slow = wrong == "sleep 5"
        problems = list(problems_of(f"```sh\n{wrong}\n```\n", [], limit=0.5 if is_slow else LONGEST))
        assert problems and ("0.5 s" in problems[-1]) == is_slow, problems
        assert ("ended with status" in problems[0]) != is_slow, problems
    assert list(problems_of("no command\n", []))
    here, times = as_here("phalanx launch --nnodes 2 --rdzv-endpoint HOST:29400 -- PROGRAM")
    assert re.fullmatch(r"phalanx launch --nnodes 2 --rdzv-endpoint 127\.0\.0\.1:\d+ -- lifecycle", here), here
    assert times == 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", action="append", default=[], type=pathlib.Path)
    parser.add_argument("--page", default=ROOT / "docs" / "lecture.md", type=pathlib.Path)
    parser.add_argument("--limit", default=LONGEST, type=float)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    path = [str(folder.resolve()) for folder in arguments.path]
    return sys.exit("\n".join(problems_of(arguments.page.read_text(), path, arguments.limit)) or None)


if __name__ == "__main__":
    main()
