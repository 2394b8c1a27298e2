"""The self-test of scripts/benchmarks.py. It measures nothing, and takes seconds."""
import argparse
import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

import benchmark_page
import benchmarks
from benchmark_page import Results, Trouble, read_json, write_file
from benchmark_steps import (STEPS, Step, read_comparison, read_exposed, read_overlap, read_simulation, read_startup,
                             table_rows)

OVERLAP = "overlap_slow_link"


def expect(name, found, wanted):
    if found != wanted:
        sys.exit(f"benchmarks: self-test failed: {name}: expected {wanted!r}, found {found!r}")


def expect_trouble(name, text, call, status=2):
    try:
        call()
    except Trouble as trouble:
        if text not in str(trouble):
            sys.exit(f"benchmarks: self-test failed: {name}: expected an error with {text!r}, found {trouble}")
        return expect(f"the status of {name}", trouble.status, status)
    sys.exit(f"benchmarks: self-test failed: {name}: expected an error with {text!r}, found none")


def test_readers():
    run = {"tokens_per_s": 100, "cpu_ms": 8, "pss_mib": 4, "peak_rss_mib": 4, "first_step_s": 2}
    ours = [dict(run, tokens_per_s=speed) for speed in (150, 200)]
    data = {"rows": [{"ranks": 1, "max_loss_difference": 1e-6}],
            "runs": {"torch, 1 ranks": [run, run], "phalanx, 1 ranks": ours}}
    figures = benchmarks.summary(read_comparison("", json.dumps(data)))
    expect("ratio", figures["1.ratio.tokens_per_s"], {"unit": "", "median": 1.75, "low": 1.5, "high": 2.0})
    expect("median", figures["1.phalanx.tokens_per_s"]["median"], 175)
    text = "x\n| a | b |\n| --- | ---: |\n| 1 | 2 % |\n\n| c |\n| --- |\n| 3 |\n"
    expect("rows", table_rows(text), [["1", "2 %"], ["3"]])
    text = ("matmul (512^3, 11 times)                        120.91 ms\n"
            "one after the other                             272.49 ms  1.94 x the longer one\n"
            "both at once                                    166.60 ms  1.18 x the longer one, speed-up 1.64\n")
    expect("overlap", read_overlap(text, "")["at_once.of_the_longer"], ("", [1.18]))
    data = json.dumps({"ranks": 2, "phalanx launch": {"median_s": 0.3, "min_s": 0.2, "max_s": 0.9}})
    expect("startup", benchmarks.summary(read_startup("", data)),
           {"phalanx launch": {"unit": "s", "median": 0.3, "low": 0.2, "high": 0.9}})
    read = next(step for step in STEPS if step.name == "collectives_c10d").read
    rows = [{"op": "all_reduce", "bytes": 4096, "backend": name, "p50_us": us}
            for name, us in (("shm", 2.0), ("c10d", 500))]
    expect("collectives", read("", json.dumps({"rows": rows}))["all_reduce.4096.c10d/shm"], ("", [250.0]))


def test_readers_of_tables():
    """What the programs have printed."""
    text = ("| schedule | makespan, ms | executed / simulated | with each pass's own time | of the stages' rate |\n"
            "| --- | ---: | ---: | ---: | ---: |\n| ZBV | 1905.1 | 1.100 | 1.012 | 90.9 % |\n")
    expect("simulation", {name: values for name, (_, values) in read_simulation(text, "").items()},
           {"ZBV.makespan": [1905.1], "ZBV.executed/simulated": [1.1], "ZBV.executed/replayed": [1.012],
            "ZBV.of_the_stages_rate": [90.9]})
    text = ("| | step, ms | communication, ms | exposed, ms | of the step | of communication |\n"
            "| --- | ---: | ---: | ---: | ---: | ---: |\n| DDP | 2506.7 | 273.88 | 208.07 | 8.30 % | 76.0 % |\n")
    found = {name: values for name, (_, values) in read_exposed(text, "").items()}
    expect("exposed", found, {"DDP.step": [2506.7], "DDP.communication": [273.88], "DDP.exposed": [208.07],
                              "DDP.of_step": [8.3], "DDP.of_communication": [76.0]})
    text = ("The link alone, microseconds per MB: all_reduce 8649, all_gather 4269, reduce_scatter 4677\n"
            "| | step, ms | computing, ms | the link alone, ms | communication, ms | exposed, ms | of the step "
            "| of communication |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
            "| DDP | 19091 | 18521 | 1669 | 3133 | 570 | 3.0 % | 18 % |\n")
    found = {name: values for name, (_, values) in read_exposed(text, "").items()}
    expect("exposed, slow link", found, {
        "DDP.step": [19091], "DDP.computing": [18521], "DDP.link_alone": [1669], "DDP.communication": [3133],
        "DDP.exposed": [570], "DDP.of_step": [3.0], "DDP.of_communication": [18]})


def test_merge():
    merged = benchmarks.merged
    one = {"machine": {"cpu": "A"}, "commit": "1", "date": "d", "steps": {"x": 1, "y": 2}}
    two = {"machine": {"cpu": "B"}, "commit": "2", "date": "e", "steps": {"x": 3}}
    expect("merge", [run["steps"] for run in merged([one], two)], [{"y": 2}, {"x": 3}])
    expect("merge of all", merged([one], dict(two, steps={"x": 3, "y": 4})), [dict(two, steps={"x": 3, "y": 4})])
    expect("merge of one commit", merged([one], dict(one, steps={"x": 5})), [dict(one, steps={"y": 2, "x": 5})])
    recorded = dict(one, commit_is="recorded in")
    expect("merge with what a commit recorded", merged([recorded], dict(one, steps={"x": 5})),
           [dict(recorded, steps={"y": 2}), dict(one, steps={"x": 5})])


FIGURE = {"unit": "", "median": 1.19, "low": 1.1, "high": 1.34}
STEP = {"command": "c", "figures": {"at_once.of_the_longer": FIGURE, "in_turns.of_the_longer": FIGURE}}
RUN = {"machine": {"cpu": "A", "cores": 2}, "commit": "1", "date": "d", "steps": {OVERLAP: STEP}}
OTHER = {"machine": {"cpu": "B", "cores": 2}, "commit": "2", "date": "d", "steps": {}}


def test_page():
    blocks = {OVERLAP: ("cpu", benchmark_page.overlap_block), "runs": ("cpu", benchmark_page.runs_block)}
    page = f"# A\n<!-- figures: {OVERLAP} -->\n<!-- end -->\nend\n<!-- figures: runs -->\n<!-- end -->\n"
    fill = lambda text, runs: benchmark_page.filled_page(text, {"cpu": Results("cpu.json", runs)}, blocks)
    filled = fill(page, [RUN])
    expect("a row", "| at the same time | 1.19 | 1.10 | 1.34 |" in filled, True)
    expect("a page made twice", fill(filled, [RUN]), filled)
    changed = filled.replace("1.19", "1.09")
    expect("a changed figure", benchmark_page.differing_blocks(changed, fill(changed, [RUN])), [OVERLAP])
    expect("of several runs", "\n\nRun 2.\n" in fill(page, [OTHER, RUN]), True)
    expect("not measured", "\nNot measured.\n" in fill(page, [OTHER]), True)
    expect("no run", fill(page, []).count("\nNot measured.\n"), 2)
    expect_trouble("no marker", f"expected '<!-- figures: {OVERLAP} -->' once", lambda: fill("# A\n", [RUN]))
    expect_trouble("unknown marker", "'figures: z' names no table", lambda: fill(page.replace(OVERLAP, "z"), [RUN]))
    first, second, _ = page.split("<!-- end -->\n")
    for cut in (first + second + "<!-- end -->\n", first + "<!-- end -->\n" + second):
        expect_trouble("no end", "expected '<!-- end -->' of the table", lambda: fill(cut, [RUN]))
    expect_trouble("an end alone", "before '<!-- end -->'", lambda: fill("<!-- end -->\n" + page, [RUN]))
    expect_trouble("a step twice", "expected it once", lambda: Results("cpu.json", [RUN, RUN]))
    bare = dict(RUN, steps={OVERLAP: dict(STEP, figures={})})
    expect_trouble("no figure", "expected a figure 'at_once.of_the_longer'", lambda: fill(page, [bare]))


def test_what_the_page_says():
    recorded = dict(RUN, commit_is="recorded in")
    head = lambda *runs: "\n".join(benchmark_page.runs_block(Results("cpu.json", list(runs))))
    expect("a commit", "; commit 1, d." in head(RUN), True)
    expect("a commit that recorded", "; recorded in 1, d." in head(recorded), True)
    both = head(recorded, OTHER)
    expect("a column", [part in both for part in ("| machine | commit |", "| recorded in 1 |", "| 2 |")], [True] * 3)
    expect("a note of a run", head(dict(RUN, note="Three machines.")).endswith("Three machines."), True)
    said = lambda **more: benchmark_page.machine_text({"cpu": "A", "cores": 2, **more})
    expect("one version", said(libtorch="2.13", torch="2.13"), "A, 2 cores, libtorch and torch 2.13")
    expect("two versions", said(libtorch="2.11", torch="2.13"), "A, 2 cores, libtorch 2.11, torch 2.13")
    expect("no version", said(), "A, 2 cores")
    two = {f"{op}.4096.p/q": {"unit": "", "low": 2.4, "high": 3} for op in benchmark_page.OPS}
    block = benchmark_page.collectives_block("c", "p", ("q",), (4096,))
    lines = block(Results("cpu.json", [dict(RUN, steps={"c": {"command": "c", "figures": two}})]))
    expect("the lower of two runs", lines[2], "| 4 KiB |" + " 2.4 |" * 5)
    remarks = lambda **more: Results("cpu.json", [dict(RUN, steps={OVERLAP: dict(STEP, **more)})]).remarks([OVERLAP])
    busy = ["Busy: 30 %."]
    expect("busy", remarks(others=0.3, others_before=0.0), busy)
    expect("busy before", remarks(others=0.0, others_before=0.3), busy)
    expect("quiet", remarks(others=0.01, others_before=0.02), [])
    step = {"command": "c", "figures": {"2.loss_difference": {"unit": "", "high": 9.6e-7}}}
    results = Results("cpu.json", [dict(RUN, steps={"a": step, "b": dict(step, figures={})})])
    rows = [("A", "a", 2), ("B", "b", 2), ("C", "c", 2)]
    expect("losses", benchmark_page.losses(results, rows), ["Losses differ by 9.6e-7 at most; not recorded for B."])
    expect("all losses", benchmark_page.losses(results, rows[:1]), ["Losses differ by 9.6e-7 at most."])
    expect("no losses", benchmark_page.losses(results, rows[1:]), [])


def test_files(folder):
    results = lambda text, name="cpu.json": (write_file(folder / name, text), Results.read(folder / name))
    wrong = lambda **more: lambda: results(json.dumps({"runs": [dict(RUN, **more)]}))
    expect_trouble("no results", "scripts/benchmarks.py measures and writes it",
                   lambda: Results.read(folder / "none" / "cpu.json"))
    expect_trouble("no results of the GPU", "by hand, from h200.md", lambda: Results.read(folder / "h200.json"))
    expect_trouble("no JSON", "expected JSON", lambda: results("{"))
    expect_trouble("a list", "expected an object", lambda: results("[]"))
    for text in ('{}', '{"runs": {}}', '{"runs": 3}'):
        expect_trouble(f"runs in {text}", '"runs": expected a list', lambda: results(text))
    expect_trouble("no run", "run 1: expected an object, found 7", lambda: results('{"runs": [7]}'))
    expect_trouble("no machine", 'run 1: expected "machine", an object, found 3', wrong(machine=3))
    expect_trouble("no cores", 'expected "cores", a whole number, found none', wrong(machine={"cpu": "A"}))
    expect_trouble("no date", 'expected "date", a text, found null', wrong(date=None))
    expect_trouble("no commit", 'expected "commit", a text, found ""', wrong(commit=""))
    expect_trouble("no figures", 'expected "figures", an object', wrong(steps={"a": {"command": "c"}}))
    for figure in ({}, {"unit": "s"}, {"unit": "s", "median": "1"}):
        expect_trouble(f"the figure {figure}", "expected \"unit\" and numbers",
                       wrong(steps={"a": {"command": "c", "figures": {"x": figure}}}))
    results(json.dumps({"runs": [RUN]}), "h200.json")
    expect_trouble("no figure of the GPU", "take it from h200.md by hand",
                   lambda: Results.read(folder / "h200.json").figure("training", "x"))
    (folder / "bytes").write_bytes(b"\xff")
    expect_trouble("no text", "it is not UTF-8", lambda: read_json(folder / "bytes", "mend it"))
    expect_trouble("a folder", "cannot be read", lambda: read_json(folder, "mend it"))
    expect_trouble("no room", "cannot be written", lambda: write_file(folder / "none" / "x", ""))
    expect("whole files only", [file.name for file in folder.iterdir() if file.suffix == ".part"], [])


def step_of(*command, read=lambda text, _data: {"a.b": ("s", [float(text)])}, **more):
    return Step("s", "", list(command), read, 0, {"runs": 2}, {}, **more)


def options_of(folder, **more):
    return argparse.Namespace(**{"bin": folder, "python": sys.executable, "peers": None, "output": folder,
                                 "quick": False, "only": None, **more})


def test_running(folder):
    options = options_of(folder)
    run = lambda step: benchmarks.run_step(step, options, "")
    record = run(step_of("sh", "-c", "echo 2.5"))
    expect("figures", record["figures"]["a.b"]["median"], 2.5)
    expect("the command", record["command"], "OMP_NUM_THREADS=1 sh -c 'echo 2.5'")
    expect("the load", all(0 <= record[key] <= 1 for key in ("others", "others_before")), True)
    expect("skipped", run(step_of("sh", "-c", "echo skipped: no root; exit 77")), {"skipped": "no root"})
    expect("no peer", "--peers" in run(step_of("echo", needs=("peers",)))["skipped"], True)
    expect_trouble("a status", "ended with status 3", lambda: run(step_of("sh", "-c", "exit 3")), 1)
    expect_trouble("no program", "cannot be started", lambda: run(step_of("{bin}/none")))
    expect_trouble("no figures", "is not what the step reads", lambda: run(step_of("echo", "x")), 1)
    slow = step_of("sleep", "60")
    slow.limit_seconds = lambda: 0.2
    expect_trouble("a time limit", "its time limit", lambda: run(slow), 1)
    expect_trouble("an unknown step", "no such step", lambda: benchmarks.chosen_steps(["none"]))


def test_going_on(folder):
    options, step = options_of(folder), step_of("echo", "2.5")
    before = lambda: benchmarks.measured_before(step, options)
    expect("not measured before", before(), None)
    record = {"command": "OMP_NUM_THREADS=1 echo 2.5", "runs": 2, "figures": {"a": {"unit": "", "median": 1}}}
    file = folder / "s.json"
    file.write_text(json.dumps(record))
    expect("measured before", before(), record)
    for other in (dict(record, command="OMP_NUM_THREADS=1 echo 3"), dict(record, runs=1)):
        file.write_text(json.dumps(other))
        expect("another command before", before(), None)
    for text in ("{", "[]", "{}", '{"command": "c", "figures": 3}'):
        file.write_text(text)
        expect_trouble(f"the step file {text}", "remove it; the same command", before)
    file.unlink()

    open_output = lambda **more: benchmarks.open_output(options_of(folder, **more), "1")
    expect_trouble("no programs", "expected the program phalanx", open_output)
    (folder / "phalanx").write_text("")
    (folder / "file").write_text("")
    head = open_output()
    expect("the same run again", open_output(), head)
    (folder / "run.json").write_text(json.dumps({key: value for key, value in head.items() if key != "date"}))
    expect_trouble("a run without a date", 'expected "date", a text, found none', open_output)
    expect_trouble("a file as output", "expected a folder", lambda: open_output(output=folder / "file"))
    for text in ("", "[]", '{"machine": 3, "date": "d"}', '{"machine": {}}'):
        (folder / "run.json").write_text(text)
        expect_trouble(f"the run.json {text}", "run.json: ", open_output)
    (folder / "run.json").write_text(json.dumps({"machine": {}, "commit": "1", "date": "d"}))
    expect_trouble("another run's folder", "expected the machine of this run", open_output)


def test_provenance(folder):
    check = lambda found, **more: lambda: benchmarks.check_provenance(options_of(folder, **more), [], found)
    expect_trouble("no commit", "expected a git checkout", check(""))
    expect_trouble("changed sources", "commit them, build by make all", check("12345678-dirty"))
    program = folder / "phalanx"
    program.write_text("")
    check("12345678")()
    if benchmarks.commit():  # a copy without history has no time to compare with
        os.utime(program, (1, 1))
        expect_trouble("an old build", "expected a program built after the last commit", check("12345678"))
        check("12345678", quick=True)()
    check("", quick=True)()
    names = {step.name: step.all_programs() for step in STEPS}
    expect("programs", [names["ddp_5M"], names["startup_2"], names["collectives_c10d"]],
           [["phalanx"], ["phalanx", "launch_test_worker"], ["collectives"]])


def test_interruption(folder):
    """What has been measured is kept, and a Python program that runs cleans up."""
    script = (f"import pathlib, time\npathlib.Path('{folder}/begun').touch()\n"
              f"try: time.sleep(60)\nfinally: pathlib.Path('{folder}/cleaned').touch()")

    def interrupt():
        while not (folder / "begun").exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    first, second = step_of("echo", "2.5"), step_of(sys.executable, "-c", script)
    second.name = "t"
    done, counts = {}, dict.fromkeys(("measured", "measured before", "skipped", "failed"), 0)
    handler = signal.signal(signal.SIGTERM, benchmarks.stop)
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        benchmarks.measure_steps([first, second], options_of(folder), done, counts)
        sys.exit("benchmarks: self-test failed: an interruption: expected KeyboardInterrupt, found none")
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, handler)
    thread.join()
    expect("kept after an interruption", (list(done), counts["measured"]), (["s"], 1))
    expect("a file of what was measured", (folder / "s.json").exists(), True)
    expect("a program that is interrupted", (folder / "cleaned").exists(), True)
    again = dict.fromkeys(counts, 0)
    benchmarks.measure_steps([first, step_of("sh", "-c", "echo skipped: x; exit 77"), step_of("false")],
                             options_of(folder), {}, again)
    expect("counts", again, {"measured": 0, "measured before": 1, "skipped": 1, "failed": 1})
    benchmarks.keep(done, {"machine": {"cpu": "A", "cores": 1}, "commit": "1", "date": "d"}, folder / "cpu.json")
    expect("results", list(Results.read(folder / "cpu.json").steps), ["s"])


def test_program():
    def status_of(*words):
        done = subprocess.run([sys.executable, benchmarks.__file__, *words], capture_output=True, text=True,
                              timeout=60)
        return done.returncode, "Traceback" in done.stderr, done.stderr
    for words, text in ((("--page", "--check"), "not allowed with"), (("--check", "--quick"), "measures nothing"),
                        (("--peers", "/nowhere"), "expected a folder with the PyTorch program train.py"),
                        (("--only", "none"), "no such step")):
        status, traceback, error = status_of(*words)
        expect(" ".join(words), (status, traceback, text in error), (2, False, True))
    listing = subprocess.Popen([sys.executable, benchmarks.__file__, "--list"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    listing.stdout.close()
    expect("a list that nobody reads", ("Traceback" in listing.stderr.read(), listing.wait()), (False, 1))
    listing.stderr.close()
    script = str(benchmarks.ROOT / "benchmarks/exposed_shared_memory.py")
    for words in (("--program", "/none"), ("--rounds", "0"), ("--steps", "3")):
        done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True)
        expect(" ".join(words), (done.returncode, "Traceback" in done.stderr), (2, False))


def self_test():
    expect("steps have one name each", len({step.name for step in STEPS}), len(STEPS))
    for step in STEPS:  # every value that a command names is there
        for values in (step.full, step.quick):
            benchmarks.words_of(step, argparse.Namespace(bin="", python="", peers=""), values, "")
    benchmarks.PAUSE = 0.01
    test_readers()
    test_readers_of_tables()
    test_merge()
    test_page()
    test_what_the_page_says()
    for test in (test_files, test_running, test_going_on, test_provenance, test_interruption):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            test(pathlib.Path(folder))
    test_program()
    print("benchmarks: self-test passed")
