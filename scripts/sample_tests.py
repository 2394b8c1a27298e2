#!/usr/bin/env python3
"""Runs a sample of a test binary's cases: those that a seed puts first, one by one, until the time is used up.

    scripts/sample_tests.py build/release/bin/comm_hierarchical_test --seed 7 --seconds 10

The seed decides the order and the machine's speed how many cases run, at least one. Without --seed it is
PHALANX_TEST_SEED, or 1. A case that fails ends the sample, with the command that repeats it. GTEST_FILTER limits the
cases, as it does for the binary.
"""
import argparse
import os
import random
import subprocess
import sys
import time


def cases_of(binary):
    """The names of the cases that the binary would run: Suite.Case, Instance/Suite.Case/3."""
    listing = subprocess.run([binary, "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout
    suite, cases = None, []
    for line in listing.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  ") and suite:
            cases.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return [case for case in cases if not any(part.startswith("DISABLED_") for part in case.replace("/", ".").split("."))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="a GoogleTest binary")
    parser.add_argument("--seed", type=int, default=None, help="a whole number")
    parser.add_argument("--seconds", type=float, default=10, help="no case starts after so many seconds")
    arguments = parser.parse_args()
    if arguments.seed is None:
        text = os.environ.get("PHALANX_TEST_SEED", "1")
        if not text.isdigit():
            parser.error(f"PHALANX_TEST_SEED is '{text}', expected a whole number")
        arguments.seed = int(text)

    try:
        cases = cases_of(arguments.binary)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"sample_tests: {arguments.binary} does not list its cases: {error}")
    if not cases:
        sys.exit(f"sample_tests: {arguments.binary} has no case (GTEST_FILTER: {os.environ.get('GTEST_FILTER', 'not set')})")
    random.Random(arguments.seed).shuffle(cases)
    begin, done, skipped = time.monotonic(), 0, 0
    for case in cases:
        if done and time.monotonic() - begin >= arguments.seconds:
            break
        result = subprocess.run([arguments.binary, "--gtest_brief=1", "--gtest_filter=" + case], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        done += 1
        if result.returncode != 0:
            print(result.stdout)
            sys.exit(f"sample_tests: failed, seed {arguments.seed}; again: "
                     f"PHALANX_TEST_SEED={arguments.seed} {arguments.binary} --gtest_filter='{case}'")
        skipped += "[  SKIPPED ]" in result.stdout
        print(f"{case}{' (skipped)' if '[  SKIPPED ]' in result.stdout else ''}")
    print(f"sample_tests: {done} of {len(cases)} cases passed, {skipped} of them skipped; seed {arguments.seed}")


if __name__ == "__main__":
    main()
