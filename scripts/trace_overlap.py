#!/usr/bin/env python3
"""How much of the gradients' communication hides behind the backward pass, from the traces of a training run.

    scripts/trace_overlap.py RUN/profile_traces/iteration_20 [...]

For each rank and over all given folders:
  communication  time in which a bucket's all-reduce was being worked on (from its start, so not while it was queued)
  exposed        the part of it in which backward did nothing but wait for it
  hidden         the rest, as a share of communication
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


def common(left, right):
    return [[max(a, c), min(b, d)] for a, b in left for c, d in right if max(a, c) < min(b, d)]


def read(path):
    """[(name, row, begin, end)] in microseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    return [(e["name"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]


def measure(path):
    spans = read(path)
    queued = {(row, begin): end for name, row, begin, end in spans if name == "queued"}
    moving = merged((queued.get((row, begin), begin), end) for name, row, begin, end in spans
                    if name.startswith("bucket "))
    waiting = merged((begin, end) for name, row, begin, end in spans if name == "wait for gradients")
    backward = merged((begin, end) for name, row, begin, end in spans if name == "backward")
    return {"communication": length(moving), "exposed": length(common(moving, waiting)), "backward": length(backward),
            "buckets": sum(name.startswith("bucket ") for name, *_ in spans)}


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
    print(f"{'':8} {'buckets':>8} {'backward':>12} {'communication':>14} {'exposed':>12} {'hidden':>8}")
    for rank, sums in sorted(totals.items()):
        hidden = f"{100 * (1 - sums['exposed'] / sums['communication']):.1f} %" if sums["communication"] else "-"
        print(f"{rank:8} {sums['buckets']:8.0f} {sums['backward'] / 1e3:9.2f} ms {sums['communication'] / 1e3:11.2f} ms"
              f" {sums['exposed'] / 1e3:9.2f} ms {hidden:>8}")


main()
