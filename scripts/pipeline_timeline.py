#!/usr/bin/env python3
"""Trains a small Llama as a pipeline on two ranks, and holds each traced step against the simulation of its schedule with
the times that its passes took. scripts/benchmarks.py makes a table of docs/benchmarks.md of it.

    scripts/pipeline_timeline.py [--program build/release/bin/phalanx] [--schedules 1F1B ZBV] [--steps 12] [-- KEYS ...]

  executed / simulated   makespans; the simulation takes the stages' mean times and the median transfer
  of the stages' rate    the simulated makespan without transfers / the executed one
Medians over the traced steps, the first two left out. With --check the status is 1 where the first is not within 10 %
of 1: for a machine with a core for each rank and nothing else to do.
"""
import argparse
import os
import pathlib
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile

CONFIG = """
[job]
dump_folder = "{folder}/{schedule}"
[model]
flavor = "5M"
[training]
dataset_path = "{folder}/tokens.bin"
seq_len = 256
local_batch_size = 8
steps = {steps}
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "{schedule}"
[lr_scheduler]
warmup_steps = 1
[checkpoint]
enable = false
[profiling]
enable_profiling = true
profile_freq = 1
[metrics]
enable_tensorboard = false
enable_report = false
"""


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    if done.returncode != 0:
        sys.exit("pipeline_timeline: %s failed:\n%s%s" % (" ".join(command), done.stdout, done.stderr))
    return done.stdout


def makespans(text):
    """Of phalanx schedule --executed: milliseconds by what they are."""
    names = {"executed": "executed", "simulated from the stages' times": "simulated",
             "with transfers that take no time": "stages", "with each pass as long as it was": "replayed"}
    found = {}
    for line in text.splitlines():
        match = re.match(r"\s*(.*?)\s+([0-9.]+)\s+([0-9.]+)$", line)
        if match and match[1] in names:
            found[names[match[1]]] = float(match[2])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--program", default="build/release/bin/phalanx")
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "ZBV"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("more", nargs="*", help="configuration keys for every run, after --")
    options = parser.parse_args()
    far = []
    with tempfile.TemporaryDirectory() as folder:
        tokens = random.Random(1)
        pathlib.Path(folder, "tokens.bin").write_bytes(
            struct.pack("<100000H", *(tokens.randrange(4096) for _ in range(100_000))))
        print("| schedule | makespan, ms | executed / simulated | with each pass's own time | of the stages' rate |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for schedule in options.schedules:
            config = pathlib.Path(folder, "run.toml")
            config.write_text(CONFIG.format(folder=folder, schedule=schedule, steps=options.steps))
            run([options.program, "train", "-n", "2", str(config), *options.more])
            steps = []
            for step in range(3, options.steps + 1):
                traces = "%s/%s/profile_traces/iteration_%d" % (folder, schedule, step)
                steps.append(makespans(run([options.program, "schedule", "--executed", traces])))
            median = lambda value: statistics.median(value(step) for step in steps)
            ratio = median(lambda s: s["executed"] / s["simulated"])
            print("| %s | %.1f | %.3f | %.3f | %.1f %% |" % (
                schedule, median(lambda s: s["executed"]), ratio, median(lambda s: s["executed"] / s["replayed"]),
                100 * median(lambda s: s["stages"] / s["executed"])), flush=True)
            if abs(ratio - 1) > 0.1:
                far.append(schedule)
    if options.check and far:
        sys.exit("pipeline_timeline: more than 10 % from the simulation: " + ", ".join(far))


if __name__ == "__main__":
    main()
