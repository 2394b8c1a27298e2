#!/usr/bin/env python3
"""How long ranks take from the launcher's exec through their first all_reduce to its exit, beside torchrun.

    python benchmarks/startup.py [--bin build/release/bin] [--ranks 2] [--repeats 5] [--json FILE]
                                 [--limit SECONDS] [--limit-ratio R] [--without-torchrun]

Both run the same thing: N ranks meet, sum one tensor over gloo or shared memory, leave. The runs of the launchers take
turns, so that what else the machine does meets all of them alike. torchrun and the Python worker need torch in this
interpreter; without it only phalanx launch is timed, and the table says so.

With --limit it fails if the median of phalanx launch is more than that, and with --limit-ratio if it is more than so
much of torchrun's, in each of three tries. If other programs had a tenth of the machine's time or more in all of the
failed tries, nothing can be said: it says so, and ends with status 77 (skipped).
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts"))
from machine_load import BUSY, Others


SKIPPED = 77  # the status of a test that this machine does not allow


def wrong(what):
    print(f"startup: {what}", file=sys.stderr)
    sys.exit(2)


def worker():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    x = torch.ones(1000)
    dist.all_reduce(x)
    assert int(x[0]) == dist.get_world_size()
    dist.destroy_process_group()


def commands(bin_dir, ranks):
    rank_program = os.path.join(bin_dir, "launch_test_worker")
    result = {
        "phalanx launch": [os.path.join(bin_dir, "phalanx"), "launch", "-n", str(ranks), rank_program],
        "one rank, no launcher": [rank_program],
    }
    if importlib.util.find_spec("torch"):
        # Without --master-port torchrun takes a fixed one; --standalone lets the system choose.
        result["torchrun"] = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                              str(ranks), os.path.abspath(__file__), "--worker"]
    return result


def timed(command):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PHALANX_", "TORCHELASTIC_"))}
    environment["OMP_NUM_THREADS"] = "1"
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except OSError as error:
        wrong(f"{command[0]} cannot be started: {error.strerror}; build it: make all, or name its folder by --bin")
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(known, repeats):
    """The figures of each command, and which share of the machine's time other programs had."""
    times = {name: [] for name in known}
    for command in known.values():  # once for nothing: files come into memory
        timed(command)
    others = Others()
    for _ in range(repeats):
        for name, command in known.items():
            times[name].append(timed(command))
    share = others.share()
    figures = {}
    for name, pairs in times.items():
        wall, cpu = zip(*pairs)
        figures[name] = {"median_s": round(statistics.median(wall), 3), "min_s": round(min(wall), 3),
                         "max_s": round(max(wall), 3), "cpu_s": round(statistics.median(cpu), 3)}
    return figures, share


def print_table(figures, ranks, repeats):
    print(f"{ranks} ranks on {len(os.sched_getaffinity(0))} cores, {repeats} runs each: "
          "seconds from exec to exit, CPU seconds of all processes\n")
    print(f"| {'':<22} | median |    min |    max |  CPU s |")
    print(f"| {'-' * 22} | -----: | -----: | -----: | -----: |")
    for name, row in figures.items():
        print(f"| {name:<22} | {row['median_s']:6.3f} | {row['min_s']:6.3f} | {row['max_s']:6.3f} | "
              f"{row['cpu_s']:6.3f} |")
    if "torchrun" in figures:
        ratio = figures["torchrun"]["median_s"] / figures["phalanx launch"]["median_s"]
        print(f"\nphalanx launch takes 1/{ratio:.1f} of torchrun's time")
    else:
        print("\ntorchrun was not timed")


def what_is_too_slow(figures, limit, ratio):
    ours = figures["phalanx launch"]["median_s"]
    if limit is not None and ours > limit:
        return f"phalanx launch took {ours} s: more than {limit} s"
    if ratio is not None and "torchrun" in figures and ours > ratio * figures["torchrun"]["median_s"]:
        return f"phalanx launch took {ours} s: more than {ratio} of torchrun's {figures['torchrun']['median_s']} s"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="a file for the figures")
    parser.add_argument("--limit", type=float, help="seconds that phalanx launch may take")
    parser.add_argument("--limit-ratio", type=float, help="of torchrun's time that phalanx launch may take")
    parser.add_argument("--without-torchrun", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker()
    if arguments.ranks < 1 or arguments.repeats < 1:
        parser.error(f"--ranks {arguments.ranks} --repeats {arguments.repeats}: expected 1 or more of each")
    known = commands(arguments.bin, arguments.ranks)
    if arguments.without_torchrun:
        known.pop("torchrun", None)
    loads = []
    for _ in range(3):
        figures, load = measure(known, arguments.repeats)
        print_table(figures, arguments.ranks, arguments.repeats)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"ranks": arguments.ranks, "repeats": arguments.repeats, **figures}, file, indent=2)
        trouble = what_is_too_slow(figures, arguments.limit, arguments.limit_ratio)
        if trouble is None:
            return 0
        loads.append(load)
        print(f"{trouble}; meanwhile other programs had {load:.0%} of the machine's time\n")
    if min(loads) >= BUSY:
        print("skipped: the machine is busy with other programs, so the limit can be neither kept nor broken")
        return SKIPPED
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
