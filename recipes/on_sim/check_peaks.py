#!/usr/bin/env python3
"""The most memory of each of four simulated devices in a training step: DataParallel beside DDP.

    check_peaks.py CIFAR_DATA_PARALLEL PHALANX
"""
import re
import subprocess
import sys


def peaks_of(command):
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    print(run.stdout)
    return [float(peak) for peak in re.findall(r"peak memory of sim:\d: ([0-9.]+) MiB", run.stdout)]


TRIES = 3  # peaks differ from run to run, as memory is free again when a device has come so far


def problem_of(recipe, phalanx):
    flags = ["--images", "640", "--epochs", "1", "--per-rank"]
    one_process = peaks_of([recipe, "--replicas", "4", *flags])
    ddp = peaks_of([phalanx, "launch", "-n", "4", "--", recipe, *flags])
    if len(one_process) != 4 or len(ddp) != 4:
        sys.exit(f"expected four peaks each, found {one_process} and {ddp}")
    others = one_process[1:]
    if one_process[0] < 1.1 * max(others) or max(others) > 1.2 * min(others) or max(ddp) > 1.2 * min(ddp):
        return f"expected device 0 alone to need more under DataParallel, found {one_process} and {ddp}"
    print(f"device 0 needs {one_process[0] / max(others):.2f} x the others; under DDP all need the same")
    return None


def main():
    problems = []
    while len(problems) < TRIES:
        problem = problem_of(*sys.argv[1:])
        if problem is None:
            return
        problems.append(problem)
    sys.exit("\n".join(problems))


main()
