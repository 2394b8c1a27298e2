#!/usr/bin/env python3
"""Runs every measurement of docs/benchmarks.md on this machine, and makes the tables of the page.

    scripts/benchmarks.py --list                          the steps, their commands, and how long they take
    scripts/benchmarks.py --peers DIR                     runs all of them, into benchmarks/results/cpu.json
    scripts/benchmarks.py --peers DIR --only ddp_5M tp_5M
    scripts/benchmarks.py --quick --only startup_2        fewest repetitions, to try a step; the figures are not kept
    scripts/benchmarks.py --page                          makes the tables of the page from benchmarks/results/*.json
    scripts/benchmarks.py --check                         fails where the page differs from them
    scripts/benchmarks.py --self-test

Commit, build with `make all`, and leave the machine alone: figures are kept only of a commit without changes, and of
programs that are younger than its C++ sources. DIR is the folder of the PyTorch program train.py that
scripts/compare_with_torch.py describes; without it the steps that need it are skipped. Each step has its own time
limit. What was measured lies in the folder --output; the same command again measures only the steps that are not
there. At the end the figures replace those of the same steps in cpu.json, which keeps the others with their machine and
commit.

The status is 0, 1 where a step failed or the page differs, 2 where something given is wrong, 130 after an interruption.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import benchmark_page
from benchmark_page import Failure, Results, Trouble, read_json, read_text, require, require_step, write_file
from benchmark_steps import STEPS
from machine_load import BUSY, Others

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "benchmarks/results"
STATUS_SKIPPED = 77  # of a benchmark that this machine does not allow
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
PAUSE = 2.0  # seconds before a step in which nothing of ours runs, so that the use by others can be seen
# What a program is made of.
COMPILED = ["*.h", "*.cc", "*.cu", "*.inc", "*.cmake", "*CMakeLists.txt", "third_party", ":!tests", ":!*_test.cc",
            ":!*/testing/*"]


# ------------------------------------------------------------------------------------------------ the machine

def first_match(pattern, text):
    match = re.search(pattern, text)
    return match[1].strip() if match else None


def printed(command):
    """What a command printed, or "" where there is no such program."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout
    except OSError:
        return ""


def machine(options):
    cpu = pathlib.Path("/proc/cpuinfo").read_text()
    flags = set((first_match(r"flags\s*: (.*)", cpu) or "").split())
    l3 = pathlib.Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    memory = int(first_match(r"MemTotal:\s*(\d+)", pathlib.Path("/proc/meminfo").read_text()))
    model = first_match(r"model name\s*: (.*)", cpu) or "unknown CPU"
    return {"cpu": ("virtual " if "hypervisor" in flags else "") + model,
            "cores": len(os.sched_getaffinity(0)),
            "flags": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in flags],
            "l3_mib": int(l3.read_text().strip().rstrip("K")) // 1024 if l3.exists() else None,
            "memory_gib": round(memory / 2**20),
            "kernel": os.uname().release,
            "libtorch": first_match(r"libtorch\s+([^\s,]+)", printed([str(options.bin / "phalanx"), "doctor"])),
            "torch": printed([options.python, "-c", "import torch; print(torch.__version__)"]).strip() or None,
            "open_mpi": first_match(r"Open MPI\) (\S+)", printed(["mpirun", "--version"]))}


def commit():
    """Of the sources; -dirty where they differ from it. Pages and results do not change what is measured."""
    git = lambda *words: printed(["git", "-C", str(ROOT), *words]).strip()
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!benchmarks/results")
    return git("rev-parse", "--short=8", "HEAD") + ("-dirty" if changed else "")


def check_provenance(options, steps, found):
    """Refuses figures that no commit stands for."""
    if options.quick:
        return
    advice = "or try a step by --quick, whose figures are not kept"
    if not found:
        raise Trouble(f"{ROOT}: expected a git checkout, whose commit the figures name, found none; measure in a "
                      f"clone, {advice}")
    if found.endswith("-dirty"):
        raise Trouble(f"{ROOT}: expected the files of commit {found.removesuffix('-dirty')}, found changes (git "
                      f"status); commit them, build by make all, and measure then, {advice}")
    changed = int(printed(["git", "-C", str(ROOT), "log", "-1", "--format=%ct", "--", *COMPILED]).strip() or 0)
    for name in sorted({"phalanx", *(name for step in steps for name in step.all_programs())}):
        program = options.bin / name
        if program.exists() and program.stat().st_mtime < changed:
            when = lambda seconds: datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
            raise Trouble(f"{program}: expected a program built after the last commit to the sources "
                          f"({when(changed)}), found one of {when(program.stat().st_mtime)}; build it: make all; where "
                          f"nothing is left to build, remove it and build again, {advice}")


# ------------------------------------------------------------------------------------------------ running a step

def words_of(step, options, values, data):
    """The command with its values, as it runs here, and as the results say it."""
    here = {"bin": options.bin, "python": options.python, "peers": options.peers, "json": data}
    named = {"bin": "build/release/bin", "python": "python", "peers": "DIR", "json": "FILE"}
    ours, theirs = ([word.format(**values, **names) for word in step.command] for names in (here, named))
    return ours, " ".join([*(f"{name}={value}" for name, value in ENVIRONMENT.items()), shlex.join(theirs)])


def what_is_missing(step, options):
    """Why a step is skipped here, or None."""
    if "peers" in step.needs and options.peers is None:
        return "no --peers DIR with the PyTorch program train.py (scripts/compare_with_torch.py --help)"
    if "torch" in step.needs and not printed([options.python, "-c", "import torch; print(torch.__version__)"]):
        return f"{options.python} has no torch: name one that has by --python"
    if "mpirun" in step.needs and not shutil.which("mpirun"):
        return "no mpirun in PATH (Debian: openmpi-bin)"
    return None


def clock(seconds):
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s" if seconds >= 60 else f"{seconds:.0f} s"


def heed_interrupts():
    """A job in the background of a script has SIGINT ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_group(process):
    """First gently: Python removes its temporary folders, mpirun ends its ranks, scripts remove what they made."""
    for number, seconds in ((signal.SIGINT, 10), (signal.SIGTERM, 10)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=seconds)
            break
        except ProcessLookupError:
            break
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
    try:  # what has outlived its parent
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_command(command, log, label, deadline, begin):
    """The status and what the command printed on its standard output; the rest goes into the log."""
    with open(log, "a") as errors, tempfile.TemporaryFile("w+") as out:
        errors.write("$ " + shlex.join(command) + "\n")
        errors.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors, start_new_session=True,
                                   env={**os.environ, **ENVIRONMENT}, preexec_fn=heed_interrupts)
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now > deadline:
                    raise TimeoutError
                if sys.stdout.isatty():
                    print(f"\r{label}: {clock(now - begin)} ", end="", flush=True)
                try:
                    process.wait(timeout=min(1.0, max(0.01, deadline - now)))
                except subprocess.TimeoutExpired:
                    pass
        except BaseException:
            end_group(process)
            raise
        out.seek(0)
        text = out.read()
        errors.write(text)
    return process.returncode, text


def summary(samples):
    """{name: (unit, values)} as figures."""
    return {name: {"unit": unit, "median": round_figure(statistics.median(values)), "low": round_figure(min(values)),
                   "high": round_figure(max(values))} for name, (unit, values) in samples.items()}


def round_figure(value):
    return float(f"{value:.5g}")


def run_step(step, options, label):
    """The step's record. Throws Trouble; a skipped step has the key "skipped"."""
    reason = what_is_missing(step, options)
    if reason:
        return {"skipped": reason}
    values = step.quick if options.quick else step.full
    log, data = options.output / f"{step.name}.log", options.output / f"{step.name}.data.json"
    write_file(log, "")
    before = Others()
    time.sleep(PAUSE)
    others_before = before.share()
    begin, others = time.monotonic(), Others()
    limit = step.limit_seconds()
    samples, times = {}, values.get("runs", 1)
    for _ in range(times):
        command, named = words_of(step, options, values, data)
        data.unlink(missing_ok=True)
        try:
            status, text = run_command(command, log, label, begin + limit, begin)
        except TimeoutError:
            raise Failure(f"step {step.name} was stopped after {clock(limit)}, its time limit; expected about "
                          f"{step.minutes:g} min. See {log}, and whether other programs run here; then give the same "
                          "command again") from None
        except OSError as error:
            raise Trouble(f"step {step.name}: {command[0]} cannot be started: {error.strerror}; build it: make all, or "
                          "name the folder of the programs by --bin") from None
        if status == STATUS_SKIPPED:
            return {"skipped": first_match(r"skipped: (.*)", text) or f"see {log}"}
        if status != 0:
            raise Failure(f"step {step.name} ended with status {status}, expected 0; the end of {log}:\n"
                          + "\n".join(log.read_text().splitlines()[-8:]))
        try:
            found = step.read(text, data.read_text() if data.exists() else "")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
            raise Failure(f"step {step.name}: the output of its program is not what the step reads ({error!r}); see "
                          f"{log}; mend its reader in scripts/benchmark_steps.py") from None
        if not found:
            raise Failure(f"step {step.name}: found no figures in the output of its program; see {log}; mend its "
                          "reader in scripts/benchmark_steps.py")
        for name, (unit, more) in found.items():
            samples.setdefault(name, (unit, []))[1].extend(more)
    return {"command": named, "runs": times, "seconds": round(time.monotonic() - begin),
            "others_before": round(others_before, 3), "others": round(others.share(), 3), "figures": summary(samples)}


# ------------------------------------------------------------------------------------------------ the run

def chosen_steps(names):
    known = {step.name: step for step in STEPS}
    for name in names or []:
        if name not in known:
            raise Trouble(f"--only {name}: no such step; expected some of {', '.join(known)}")
    return [known[name] for name in known if not names or name in names]


def open_output(options, found):
    """The head of this run. An output folder holds the figures of one machine and one commit."""
    if not (options.bin / "phalanx").is_file():
        raise Trouble(f"{options.bin}: expected the program phalanx, found none: build it with make all, or name the "
                      "folder by --bin")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Trouble(f"--output {options.output}: expected a folder, or a place for one, found something else "
                      f"({error.strerror}): name another") from None
    head = {"machine": machine(options), "commit": found, "quick": options.quick}
    file = options.output / "run.json"
    if file.exists():
        advice = f"name another folder by --output, or remove {options.output}"
        before = read_json(file, advice)
        require(before, {"machine": dict, "date": str}, file, "the file", advice)
        for key, value in head.items():
            if before.get(key) != value:
                raise Trouble(f"{file}: expected the {key} of this run, {value}, found {before.get(key)}; {advice}")
        return before
    head["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    write_file(file, json.dumps(head, indent=1) + "\n")
    return head


def measured_before(step, options):
    """The record of the same command in the folder --output, or None."""
    file = options.output / f"{step.name}.json"
    if not file.exists():
        return None
    advice = "remove it; the same command then measures this step again"
    record = read_json(file, advice)
    require_step(record, file, "the file", advice)
    values = step.quick if options.quick else step.full
    _, named = words_of(step, options, values, "")
    return record if (record["command"], record.get("runs")) == (named, values.get("runs", 1)) else None


def measure_steps(steps, options, done, counts):
    """Fills both, so that they hold what there is when the user stops it."""
    for number, step in enumerate(steps, 1):
        label = f"[{number}/{len(steps)}] {step.name}"
        begin = time.monotonic()
        try:
            record = measured_before(step, options)
            if record:
                done[step.name] = record
                counts["measured before"] += 1
                print(f"{label}: measured before")
                continue
            about = "" if options.quick else f", about {step.minutes:g} min"
            print(f"{label}: {step.what}{about}", flush=True)
            record = run_step(step, options, label)
            if "skipped" in record:
                counts["skipped"] += 1
                print(f"\r{label}: skipped: {record['skipped']}", flush=True)
                continue
            write_file(options.output / f"{step.name}.json", text_of(record))
        except Trouble as trouble:
            counts["failed"] += 1
            print(f"\r{label}: failed after {clock(time.monotonic() - begin)}\nbenchmarks: {trouble}", flush=True)
            continue
        done[step.name] = record
        counts["measured"] += 1
        share = max(record["others_before"], record["others"])
        others = f"; other programs had up to {share:.0%} of the machine's time" if share >= BUSY else ""
        print(f"\r{label}: done in {clock(record['seconds'])}{others}", flush=True)


def keep(done, head, file):
    runs = Results.read(file).runs if file.exists() else []
    new = {"machine": head["machine"], "commit": head["commit"], "date": head["date"], "steps": done}
    write_file(file, text_of({"runs": merged(runs, new)}))


def measure(options, results=RESULTS):
    """The status of the program."""
    steps = chosen_steps(options.only)
    if options.peers and not (options.peers / "train.py").is_file():
        raise Trouble(f"--peers {options.peers}: expected a folder with the PyTorch program train.py, found none; "
                      "scripts/compare_with_torch.py --help describes it; without --peers its steps are skipped")
    found, file = commit(), results / "cpu.json"
    check_provenance(options, steps, found)
    if file.exists() and not options.quick:
        Results.read(file)  # it is mended before hours of measuring, not after
    head = open_output(options, found)
    print(f"{benchmark_page.machine_text(head['machine'])}; commit {found or 'unknown'}; into {options.output}")
    done, counts = {}, dict.fromkeys(("measured", "measured before", "skipped", "failed"), 0)
    interrupted = False
    try:
        measure_steps(steps, options, done, counts)
    except KeyboardInterrupt:
        interrupted = True
        print("\nbenchmarks: interrupted")
    if options.quick:
        print(f"--quick: the figures lie in {options.output}; they are not kept")
    elif done:
        keep(done, head, file)
        print(f"{len(done)} step(s) written to {file}; then scripts/benchmarks.py --page")
    counts["not run"] = len(steps) - sum(counts.values())
    print(f"of {len(steps)} step(s): " + ", ".join(f"{count} {name}" for name, count in counts.items() if count))
    if counts["failed"] or counts["not run"]:
        print("the same command again measures only what is missing")
    return 130 if interrupted else 1 if counts["failed"] else 0


def merged(runs, new):
    """The runs without what `new` has measured again, and `new`, last."""
    kept = []
    for run in runs:
        steps = {name: step for name, step in run["steps"].items() if name not in new["steps"]}
        if "commit_is" not in run and (run["machine"], run["commit"]) == (new["machine"], new["commit"]):
            new = dict(new, steps={**steps, **new["steps"]})
        elif steps:
            kept.append(dict(run, steps=steps))
    return kept + [new]


def text_of(value):
    """JSON with a line for each figure."""
    text = json.dumps(value, indent=1)
    return re.sub(r'\{\s+("unit"[^{}]*?)\s+\}', lambda match: "{" + re.sub(r"\n\s*", " ", match[1]) + "}", text) + "\n"


# ------------------------------------------------------------------------------------------------ the page

def page_and_filled():
    text = read_text(PAGE, "take the committed one: git checkout docs/benchmarks.md")
    files = {file for file, _ in benchmark_page.BLOCKS.values()}
    return text, benchmark_page.filled_page(text, {file: Results.read(RESULTS / f"{file}.json") for file in files})


def check_page():
    text, filled = page_and_filled()
    differing = benchmark_page.differing_blocks(text, filled)
    if differing:
        raise Failure(f"docs/benchmarks.md: {', '.join(differing)}: expected the figures of benchmarks/results/*.json, "
                      "found others; scripts/benchmarks.py --page writes those of the files")
    unknown = set(Results.read(RESULTS / "cpu.json").steps) - {step.name for step in STEPS}
    if unknown:
        raise Failure(f"benchmarks/results/cpu.json has steps that scripts/benchmark_steps.py has not: "
                      f"{', '.join(sorted(unknown))}; take them out of one, or into the other")
    print(f"benchmarks: the {len(benchmark_page.BLOCKS)} blocks of docs/benchmarks.md have the figures of the results")


def list_steps():
    for step in STEPS:
        _, named = words_of(step, argparse.Namespace(bin="", python="", peers=""), step.full, "")
        runs = step.full.get("runs", 1)
        print(f"{step.name}: {step.what}; about {step.minutes:g} min\n    {named}"
              + (f"    # {runs} times" if runs > 1 else ""))
    print(f"together about {sum(step.minutes for step in STEPS):g} min on two cores with nothing else to do")


# ------------------------------------------------------------------------------------------------ the program

def parsed_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = lambda name: pathlib.Path(name).resolve()
    measuring = parser.add_argument_group("what is measured, and how")
    measuring.add_argument("--only", nargs="+", metavar="NAME", help="these steps")
    measuring.add_argument("--quick", action="store_true", default=None,
                           help="fewest repetitions; the figures are not kept")
    measuring.add_argument("--peers", type=folder, metavar="DIR", help="folder of the PyTorch program train.py")
    measuring.add_argument("--bin", type=folder, metavar="DIR",
                           help="folder of the programs; default: build/release/bin")
    measuring.add_argument("--python", help="a Python that has torch; default: that of .venv, or this one")
    measuring.add_argument("--output", type=folder, metavar="DIR",
                           help="folder of the logs and of each step's figures; default: build/benchmarks")
    modes = parser.add_argument_group("instead of measuring").add_mutually_exclusive_group()
    for name, what in (("list", "print the steps"), ("page", "make the tables of the page"),
                       ("check", "fail where the page differs from the results"), ("self-test", "test this program")):
        modes.add_argument(f"--{name}", action="store_true", help=what)
    options = parser.parse_args()
    for mode in ("list", "page", "check", "self_test"):
        for other in ("only", "quick", "peers", "bin", "python", "output"):
            if getattr(options, mode) and getattr(options, other) is not None:
                parser.error(f"--{mode.replace('_', '-')} measures nothing: leave out --{other}")
    venv = ROOT / ".venv/bin/python"
    options.bin = options.bin or ROOT / "build/release/bin"
    options.python = options.python or (str(venv) if venv.exists() else sys.executable)
    options.output = options.output or ROOT / ("build/benchmarks-quick" if options.quick else "build/benchmarks")
    options.quick = bool(options.quick)
    return options


def stop(*_):
    raise KeyboardInterrupt


def main():
    options = parsed_options()
    signal.signal(signal.SIGTERM, stop)
    try:
        if options.list:
            list_steps()
        elif options.self_test:
            import benchmark_tests
            benchmark_tests.self_test()
        elif options.page:
            write_file(PAGE, page_and_filled()[1])
        elif options.check:
            check_page()
        else:
            return measure(options)
        sys.stdout.flush()
    except Trouble as trouble:
        print(f"benchmarks: {trouble}", file=sys.stderr)
        return trouble.status
    except KeyboardInterrupt:
        print("\nbenchmarks: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
