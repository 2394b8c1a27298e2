#!/usr/bin/env python3
"""How much of the communication of training steps hides behind computing, from the traces of a training run.

    scripts/trace_overlap.py RUN/profile_traces/iteration_20 [...]

For each rank and over all given folders:
  communication  time in which an operation was being worked on (from its start, so not while it was queued)
  exposed        time in which the training thread did nothing but wait for one
  hidden         the rest of communication, as a share of it
"""
import argparse
import json
import pathlib
import sys
from collections import defaultdict


def merged(intervals):
    """The same times without overlaps, in order."""
    result = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([begin, end])
    return result


def length(intervals):
    return sum(end - begin for begin, end in intervals)


def measure(path):
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    queued = {(e["tid"], e["ts"]): e["ts"] + e["dur"] for e in spans if e["name"] == "queued"}
    steps = merged((e["ts"], e["ts"] + e["dur"]) for e in spans if e["cat"] == "step")

    def of_steps(intervals):
        """What lies in a step, with the validation and the save that belong to it."""
        return [[max(a, c), min(b, d)] for a, b in merged(intervals) for c, d in steps if max(a, c) < min(b, d)]

    operations = [e for e in spans if "call" in e.get("args", {})]
    moving = of_steps((queued.get((e["tid"], e["ts"]), e["ts"]), e["ts"] + e["dur"]) for e in operations)
    waiting = of_steps((e["ts"], e["ts"] + e["dur"]) for e in spans if e["cat"] == "wait")
    return {"communication": length(moving), "exposed": length(waiting), "steps": length(steps),
            "operations": len(operations)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    totals = defaultdict(lambda: defaultdict(float))
    for folder in parser.parse_args().folders:
        files = sorted(folder.glob("rank*_trace.json"))
        if not files:
            sys.exit(f"trace_overlap: {folder} holds no rank*_trace.json")
        for path in files:
            for key, value in measure(path).items():
                totals[path.name.split("_")[0]][key] += value
    print(f"{'':8} {'operations':>10} {'steps':>12} {'communication':>14} {'exposed':>12} {'of steps':>9} {'hidden':>8}")
    for rank, sums in sorted(totals.items()):
        hidden = f"{100 * max(0, 1 - sums['exposed'] / sums['communication']):.1f} %" if sums["communication"] else "-"
        share = f"{100 * sums['exposed'] / sums['steps']:.1f} %" if sums["steps"] else "-"
        print(f"{rank:8} {sums['operations']:10.0f} {sums['steps'] / 1e3:9.2f} ms {sums['communication'] / 1e3:11.2f} ms"
              f" {sums['exposed'] / 1e3:9.2f} ms {share:>9} {hidden:>8}")


main()
