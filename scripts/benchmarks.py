#!/usr/bin/env python3
"""Runs every measurement of docs/benchmarks.md on this machine, and makes the tables of the page.

    scripts/benchmarks.py --list                          the steps, their commands, and how long they take
    scripts/benchmarks.py --peers DIR                     runs all of them, into benchmarks/results/cpu.json
    scripts/benchmarks.py --peers DIR --only ddp_5M tp_5M
    scripts/benchmarks.py --quick --only startup_2        fewest repetitions, to try a step; the figures are not kept
    scripts/benchmarks.py --page                          makes the tables of the page from benchmarks/results/*.json
    scripts/benchmarks.py --check                         fails where the page differs from them
    scripts/benchmarks.py --self-test

Build with `make all` first, and leave the machine alone. DIR is the folder of the PyTorch program train.py that
scripts/compare_with_torch.py describes. A step whose peer is missing is skipped. Each step has its own time limit. What
was measured lies in the folder --output; the same command again goes on after the last finished step. At the end the
figures replace those of the same steps in cpu.json, which keeps the others with their machine and commit.
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import benchmark_page
from benchmark_page import Results, Trouble
from benchmark_steps import STEPS, Step, read_comparison, read_overlap, read_startup, table_rows

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "benchmarks/results"
SKIPPED = 77  # the status of a benchmark that this machine does not allow
BUSY = 0.1    # of the machine's time in the hands of others


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


def busy_seconds():
    """Of all CPUs, by everybody, what the hypervisor gave to others included."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# ------------------------------------------------------------------------------------------------ running a step

def words_of(step, options, values, data):
    """The command with its values, as it runs here, and as the results say it."""
    here = {"bin": options.bin, "python": options.python, "peers": options.peers, "json": data}
    named = {"bin": "build/release/bin", "python": "python", "peers": "DIR", "json": "FILE"}
    return tuple([word.format(**values, **names) for word in step.command] for names in (here, named))


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


def end_group(process):
    """First gently: mpirun ends its ranks, and scripts remove what they made."""
    for number, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=seconds)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            pass


def run_command(command, log, label, deadline, begin):
    """The status and what the command printed on its standard output; the rest goes into the log."""
    with open(log, "a") as errors, tempfile.TemporaryFile("w+") as out:
        errors.write("$ " + shlex.join(command) + "\n")
        errors.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors, start_new_session=True,
                                   env=dict(os.environ, OMP_NUM_THREADS="1"))
        try:
            while process.poll() is None:
                now = time.monotonic()
                if now > deadline:
                    end_group(process)
                    raise TimeoutError
                if sys.stdout.isatty():
                    print(f"\r{label}: {clock(now - begin)} ", end="", flush=True)
                try:
                    process.wait(timeout=min(1.0, max(0.01, deadline - now)))
                except subprocess.TimeoutExpired:
                    pass
        except KeyboardInterrupt:
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
    log.write_text("")
    begin, own, busy = time.monotonic(), own_seconds(), busy_seconds()
    limit = step.limit_seconds()
    samples, times = {}, values.get("runs", 1)
    for _ in range(times):
        command, named = words_of(step, options, values, data)
        data.unlink(missing_ok=True)
        try:
            status, text = run_command(command, log, label, begin + limit, begin)
        except TimeoutError:
            raise Trouble(f"step {step.name} was stopped after {clock(limit)}, its time limit; expected about "
                          f"{step.minutes:g} min. See {log}, and whether other programs run here; then give the same "
                          "command again") from None
        except OSError as error:
            raise Trouble(f"step {step.name}: {command[0]} cannot be started: {error.strerror}; build it: make all, or "
                          "name the folder of the programs by --bin") from None
        if status == SKIPPED:
            return {"skipped": first_match(r"skipped: (.*)", text) or f"see {log}"}
        if status != 0:
            raise Trouble(f"step {step.name} ended with status {status}, expected 0; the end of {log}:\n"
                          + "\n".join(log.read_text().splitlines()[-8:]))
        try:
            found = step.read(text, data.read_text() if data.exists() else "")
        except (ValueError, KeyError, TypeError) as error:
            raise Trouble(f"step {step.name}: the output of its program is not what the step reads ({error!r}); see "
                          f"{log}; mend its reader in scripts/benchmark_steps.py") from None
        if not found:
            raise Trouble(f"step {step.name}: found no figures in the output of its program; see {log}; mend its "
                          "reader in scripts/benchmark_steps.py")
        for name, (unit, more) in found.items():
            samples.setdefault(name, (unit, []))[1].extend(more)
    seconds = time.monotonic() - begin
    others = max(0.0, busy_seconds() - busy - (own_seconds() - own)) / (seconds * os.cpu_count())
    return {"command": shlex.join(named), "runs": times, "seconds": round(seconds), "others": round(others, 3),
            "figures": summary(samples)}


# ------------------------------------------------------------------------------------------------ the run

def chosen_steps(names):
    known = {step.name: step for step in STEPS}
    for name in names or []:
        if name not in known:
            raise Trouble(f"--only {name}: no such step; expected some of {', '.join(known)}")
    return [known[name] for name in known if not names or name in names]


def open_output(options):
    """The head of this run. An output folder holds the figures of one machine and one commit."""
    if not (options.bin / "phalanx").is_file():
        raise Trouble(f"{options.bin} has no program phalanx: build it with make all, or name the folder by --bin")
    options.output.mkdir(parents=True, exist_ok=True)
    head = {"machine": machine(options), "commit": commit(), "quick": options.quick}
    file = options.output / "run.json"
    if file.exists():
        before = json.loads(file.read_text())
        for key, value in head.items():
            if before.get(key) != value:
                raise Trouble(f"{options.output} holds figures of another run: its {key} is {before.get(key)}, here it "
                              f"is {value}. Name another folder by --output, or remove this one")
        return before
    head["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    file.write_text(json.dumps(head, indent=1) + "\n")
    return head


def measure(options):
    steps = chosen_steps(options.only)
    head = open_output(options)
    print(f"{benchmark_page.machine_text(head['machine'])}; commit {head['commit']}; into {options.output}")
    done, troubles = {}, 0
    for number, step in enumerate(steps, 1):
        label = f"[{number}/{len(steps)}] {step.name}"
        file = options.output / f"{step.name}.json"
        if file.exists():
            done[step.name] = json.loads(file.read_text())
            print(f"{label}: measured before")
            continue
        print(f"{label}: {step.what}" + ("" if options.quick else f", about {step.minutes:g} min"), flush=True)
        begin = time.monotonic()
        try:
            record = run_step(step, options, label)
        except Trouble as trouble:
            troubles += 1
            print(f"\r{label}: failed after {clock(time.monotonic() - begin)}\nbenchmarks: {trouble}", flush=True)
            continue
        if "skipped" in record:
            print(f"\r{label}: skipped: {record['skipped']}", flush=True)
            continue
        file.write_text(text_of(record))
        done[step.name] = record
        others = f"; other programs had {record['others']:.0%} of the machine's time" if record["others"] > BUSY else ""
        print(f"\r{label}: done in {clock(record['seconds'])}{others}", flush=True)
    if options.quick:
        print(f"--quick: {len(done)} step(s) in {options.output}; such figures are not kept")
    elif done:
        file = RESULTS / "cpu.json"
        runs = Results.read(file).runs if file.exists() else []
        new = {"machine": head["machine"], "commit": head["commit"], "date": head["date"], "steps": done}
        file.write_text(text_of({"runs": merged(runs, new)}))
        print(f"{len(done)} step(s) written to {file.relative_to(ROOT)}; then scripts/benchmarks.py --page")
    if troubles:
        sys.exit(f"benchmarks: {troubles} of {len(steps)} steps failed; the same command again measures these alone")


def merged(runs, new):
    """The runs without what `new` has measured again, and `new`, last."""
    kept = []
    for run in runs:
        steps = {name: step for name, step in run["steps"].items() if name not in new["steps"]}
        if (run["machine"], run["commit"]) == (new["machine"], new["commit"]):
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
    text = PAGE.read_text()
    files = {file for file, _ in benchmark_page.BLOCKS.values()}
    return text, benchmark_page.filled_page(text, {file: Results.read(RESULTS / f"{file}.json") for file in files})


def check_page():
    text, filled = page_and_filled()
    differing = benchmark_page.differing_blocks(text, filled)
    if differing:
        raise Trouble(f"docs/benchmarks.md: {', '.join(differing)}: expected the figures of benchmarks/results/*.json, "
                      "found others. Measure to change figures; then scripts/benchmarks.py --page writes the page")
    unknown = set(Results.read(RESULTS / "cpu.json").steps) - {step.name for step in STEPS}
    if unknown:
        raise Trouble(f"benchmarks/results/cpu.json has steps that scripts/benchmark_steps.py has not: "
                      f"{', '.join(sorted(unknown))}; take them out of one, or into the other")
    print(f"benchmarks: the {len(benchmark_page.BLOCKS)} blocks of docs/benchmarks.md have the figures of the results")


def list_steps():
    for step in STEPS:
        _, named = words_of(step, argparse.Namespace(bin="", python="", peers=""), step.full, "")
        runs = step.full.get("runs", 1)
        print(f"{step.name}: {step.what}; about {step.minutes:g} min\n    {shlex.join(named)}"
              + (f"    # {runs} times" if runs > 1 else ""))
    print(f"together about {sum(step.minutes for step in STEPS):g} min on two cores with nothing else to do")


# ------------------------------------------------------------------------------------------------ self-test

def expect(name, found, wanted):
    if found != wanted:
        sys.exit(f"benchmarks: self-test failed: {name}: expected {wanted!r}, found {found!r}")


def expect_trouble(name, text, call):
    try:
        call()
    except Trouble as trouble:
        if text in str(trouble):
            return
        sys.exit(f"benchmarks: self-test failed: {name}: expected an error with {text!r}, found {trouble}")
    sys.exit(f"benchmarks: self-test failed: {name}: expected an error with {text!r}, found none")


def test_readers():
    run = {"tokens_per_s": 100, "cpu_ms": 8, "pss_mib": 4, "peak_rss_mib": 4, "first_step_s": 2}
    ours = [dict(run, tokens_per_s=speed) for speed in (150, 200)]
    data = {"rows": [{"ranks": 1, "max_loss_difference": 1e-6}],
            "runs": {"torch, 1 ranks": [run, run], "phalanx, 1 ranks": ours}}
    figures = summary(read_comparison("", json.dumps(data)))
    expect("ratio", figures["1.ratio.tokens_per_s"], {"unit": "", "median": 1.75, "low": 1.5, "high": 2.0})
    expect("median", figures["1.phalanx.tokens_per_s"]["median"], 175)
    text = "x\n| a | b |\n| --- | ---: |\n| 1 | 2 % |\n\n| c |\n| --- |\n| 3 |\n"
    expect("rows", table_rows(text), [["1", "2 %"], ["3"]])
    text = ("one after the other     23.9 ms  1.93 x the longer one\n"
            "both at once            14.2 ms  1.14 x the longer one, speed-up 1.69\n")
    expect("overlap", read_overlap(text, "")["at_once.of_the_longer"], ("", [1.14]))
    data = json.dumps({"ranks": 2, "phalanx launch": {"median_s": 0.3, "min_s": 0.2, "max_s": 0.9}})
    expect("startup", summary(read_startup("", data)),
           {"phalanx launch": {"unit": "s", "median": 0.3, "low": 0.2, "high": 0.9}})
    read = next(step for step in STEPS if step.name == "collectives_c10d").read
    rows = [{"op": "all_reduce", "bytes": 4096, "backend": name, "p50_us": us}
            for name, us in (("shm", 2.0), ("c10d", 500))]
    expect("collectives", read("", json.dumps({"rows": rows}))["all_reduce.4096.c10d/shm"], ("", [250.0]))


def test_merge():
    one = {"machine": {"cpu": "A"}, "commit": "1", "date": "d", "steps": {"x": 1, "y": 2}}
    two = {"machine": {"cpu": "B"}, "commit": "2", "date": "e", "steps": {"x": 3}}
    expect("merge", [run["steps"] for run in merged([one], two)], [{"y": 2}, {"x": 3}])
    expect("merge of all", merged([one], dict(two, steps={"x": 3, "y": 4})), [dict(two, steps={"x": 3, "y": 4})])
    expect("merge of one commit", merged([one], dict(one, steps={"x": 5})), [dict(one, steps={"y": 2, "x": 5})])


def test_page():
    figure = {"unit": "", "median": 1.19, "low": 1.1, "high": 1.34}
    step = {"command": "c", "figures": {"at_once.of_the_longer": figure, "in_turns.of_the_longer": figure}}
    run = {"machine": {"cpu": "A", "cores": 2}, "commit": "1", "date": "d", "steps": {"overlap_slow_link": step}}
    blocks = {"overlap_slow_link": ("cpu", benchmark_page.overlap_block)}
    page = "# A\n<!-- figures: overlap_slow_link -->\n<!-- end -->\nend\n"
    fill = lambda text, runs: benchmark_page.filled_page(text, {"cpu": Results("cpu.json", runs)}, blocks)
    filled = fill(page, [run])
    expect("a row", "| at the same time | 1.19 | 1.10 | 1.34 |" in filled, True)
    expect("a page made twice", fill(filled, [run]), filled)
    changed = filled.replace("1.19", "1.09")
    expect("a changed figure", benchmark_page.differing_blocks(changed, fill(changed, [run])), ["overlap_slow_link"])
    other = {"machine": {"cpu": "B", "cores": 2}, "commit": "2", "date": "d", "steps": {}}
    expect("of several runs", "\n\nRun 2.\n" in fill(page, [other, run]), True)
    expect("not measured", "\nNot measured.\n" in fill(page, [other]), True)
    expect_trouble("no marker", "expected '<!-- figures: overlap_slow_link -->' once", lambda: fill("# A\n", [run]))
    unknown = page.replace("overlap_slow_link", "z")
    expect_trouble("unknown marker", "'figures: z' names no table", lambda: fill(unknown, [run]))
    expect_trouble("a step twice", "expected it once", lambda: Results("cpu.json", [run, run]))
    bare = dict(run, steps={"overlap_slow_link": {"figures": {}}})
    expect_trouble("no figure", "has no figure 'at_once", lambda: fill(page, [bare]))


def test_running(folder):
    options = argparse.Namespace(bin=folder, python=sys.executable, peers=None, output=folder, quick=False)
    read = lambda text, _data: {"a.b": ("s", [float(text)])}
    step = lambda *command, **more: Step("s", "", list(command), read, 0, {"runs": 2}, {}, **more)
    expect("figures", run_step(step("echo", "2.5"), options, "")["figures"]["a.b"]["median"], 2.5)
    expect("skipped", run_step(step("sh", "-c", "echo skipped: no root; exit 77"), options, ""), {"skipped": "no root"})
    expect("no peer", "--peers" in run_step(step("echo", needs=("peers",)), options, "")["skipped"], True)
    expect_trouble("a status", "ended with status 3", lambda: run_step(step("sh", "-c", "exit 3"), options, ""))
    expect_trouble("no program", "cannot be started", lambda: run_step(step("{bin}/none"), options, ""))
    expect_trouble("no figures", "is not what the step reads", lambda: run_step(step("echo", "x"), options, ""))
    slow = step("sleep", "60")
    slow.limit_seconds = lambda: 0.2
    expect_trouble("a time limit", "its time limit", lambda: run_step(slow, options, ""))
    expect_trouble("an unknown step", "no such step", lambda: chosen_steps(["none"]))
    (folder / "phalanx").write_text("")
    (folder / "run.json").write_text(json.dumps({"machine": {}, "commit": "1"}))
    expect_trouble("another run's folder", "holds figures of another run", lambda: open_output(options))


def self_test():
    expect("steps have one name each", len({step.name for step in STEPS}), len(STEPS))
    for step in STEPS:  # every value that a command names is there
        for values in (step.full, step.quick):
            words_of(step, argparse.Namespace(bin="", python="", peers=""), values, "")
    test_readers()
    test_merge()
    test_page()
    with tempfile.TemporaryDirectory() as folder:
        test_running(pathlib.Path(folder))
    print("benchmarks: self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps")
    parser.add_argument("--quick", action="store_true", help="fewest repetitions; the figures are not kept")
    folder = lambda name: pathlib.Path(name).resolve()
    parser.add_argument("--peers", type=folder, help="folder of the PyTorch program train.py")
    parser.add_argument("--bin", type=folder, default=ROOT / "build/release/bin", help="folder of the programs")
    parser.add_argument("--python", help="a Python that has torch; default: that of .venv, or this one")
    parser.add_argument("--output", type=folder,
                        help="folder of the logs and of each step's figures; default: build/benchmarks")
    for name in ("list", "page", "check", "self-test"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    venv = ROOT / ".venv/bin/python"
    options.python = options.python or (str(venv) if venv.exists() else sys.executable)
    options.output = options.output or ROOT / ("build/benchmarks-quick" if options.quick else "build/benchmarks")
    try:
        if options.list:
            list_steps()
        elif options.self_test:
            self_test()
        elif options.page:
            PAGE.write_text(page_and_filled()[1])
        elif options.check:
            check_page()
        else:
            measure(options)
    except Trouble as trouble:
        sys.exit(f"benchmarks: {trouble}")
    except KeyboardInterrupt:
        sys.exit("\nbenchmarks: interrupted; the same command again goes on after the last finished step")


if __name__ == "__main__":
    main()
