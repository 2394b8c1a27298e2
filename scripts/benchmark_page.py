"""The tables of docs/benchmarks.md, made from benchmarks/results/*.json. scripts/benchmarks.py writes both.

benchmarks/results/README.md describes the files. On the page a table stands between <!-- figures: NAME --> and
<!-- end -->.
"""
import json
import os
import re
import textwrap

from benchmark_steps import OPS
from machine_load import BUSY

MARK = re.compile(r"<!-- (?:figures: (\S+)|end) -->")
BLOCK = re.compile(r"^<!-- figures: (\S+) -->\n(.*?)^<!-- end -->(?:\n|\Z)", re.S | re.M)
PARTS = ("median", "low", "high")
# How to get each file of results, and a figure of it that is missing.
SOURCES = {"cpu.json": "scripts/benchmarks.py measures and writes it", "h200.json": "write it by hand, from h200.md"}


class Trouble(Exception):
    """What a user can mend: says what, where, what was expected and found, and what to do."""
    status = 2


class Failure(Trouble):
    """Nothing is wrong with what the user gave, but a check or a measurement failed."""
    status = 1


def read_text(path, advice):
    try:
        return path.read_text()
    except FileNotFoundError:
        raise Trouble(f"{path}: expected a file, found none; {advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise Trouble(f"{path}: expected a text file, found one that cannot be read ({reason}); {advice}") from None


def read_json(path, advice):
    """The object of a file. What it has to hold is up to require()."""
    text = read_text(path, advice)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Trouble(f"{path}: expected JSON, found something else ({error}); {advice}") from None
    require(value, {}, path, "the file", advice)
    return value


KINDS = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


def require(value, members, path, what, advice):
    """That a value is an object with these members: {name: type}."""
    if not isinstance(value, dict):
        raise Trouble(f"{path}: {what}: expected an object, found {json.dumps(value)[:40]}; {advice}")
    for name, kind in members.items():
        if not isinstance(value.get(name), kind) or value[name] == "":
            found = json.dumps(value[name])[:40] if name in value else "none"
            raise Trouble(f"{path}: {what}: expected \"{name}\", {KINDS[kind]}, found {found}; {advice}")


def require_step(step, path, what, advice):
    require(step, {"command": str, "figures": dict}, path, what, advice)
    for name, figure in step["figures"].items():
        require(figure, {}, path, f"{what}, figure '{name}'", advice)
        numbers = [figure[part] for part in PARTS if part in figure]
        if "unit" not in figure or not numbers or not all(type(number) in (int, float) for number in numbers):
            raise Trouble(f"{path}: {what}, figure '{name}': expected \"unit\" and numbers for some of "
                          f"{', '.join(PARTS)}, found {json.dumps(figure)[:60]}; {advice}")
    for name in ("others", "others_before"):
        if type(step.get(name, 0)) not in (int, float):
            raise Trouble(f"{path}: {what}: expected \"{name}\", a number, found {step[name]!r}; {advice}")


def write_file(path, text):
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text)
        os.replace(part, path)
    except OSError as error:
        raise Trouble(f"{path}: cannot be written: {error.strerror}; make room there, or name another folder") from None


class Results:
    """The runs of one file."""

    def __init__(self, path, runs):
        self.path, self.runs, self.steps = path, runs, {}
        advice = f"mend it, or take the committed one: git checkout {path}"
        if not isinstance(runs, list):
            raise Trouble(f"{path}: \"runs\": expected a list, found {json.dumps(runs)[:40]}; {advice}")
        for number, run in enumerate(runs, 1):
            require(run, {"machine": dict, "commit": str, "date": str, "steps": dict}, path, f"run {number}", advice)
            require(run["machine"], {"cpu": str, "cores": int}, path, f"machine of run {number}", advice)
            for name, step in run["steps"].items():
                require_step(step, path, f"step {name} of run {number}", advice)
                if name in self.steps:
                    raise Trouble(f"{path}: run {number} has the step {name}, which an earlier run has, too; expected "
                                  "it once: delete the older one")
                self.steps[name] = dict(step, run=number)

    @staticmethod
    def read(path):
        committed = f"take the committed one: git checkout {path}"
        value = read_json(path, f"{SOURCES[path.name]}; or {committed}" if path.name in SOURCES else committed)
        return Results(path, value.get("runs"))

    def has(self, step):
        return step in self.steps

    def has_figure(self, step, name, part="median"):
        return self.has(step) and part in self.steps[step]["figures"].get(name, {})

    def figure(self, step, name, part="median"):
        if not self.has_figure(step, name, part):
            figures = self.steps[step]["figures"] if self.has(step) else {}
            near = ", ".join(sorted(figures)[:6])
            advice = ("take it from h200.md by hand" if os.path.basename(self.path) == "h200.json" else
                      f"measure it again: scripts/benchmarks.py --only {step}")
            raise Trouble(f"{self.path}: step {step}: expected a figure '{name}' with '{part}', found "
                          f"{near + ', ...' if near else 'no such step'}; {advice}")
        return self.steps[step]["figures"][name][part]

    def remarks(self, steps):
        """From which run a table is, where there are several, and what its steps say of themselves."""
        present = [step for step in steps if self.has(step)]
        if not present:
            return ["Not measured."]
        found = []
        numbers = {self.steps[step]["run"] for step in present}
        if len(self.runs) > 1 and len(numbers) == 1:
            found.append(f"Run {numbers.pop()}.")
        missing = [step for step in steps if step not in present]
        notes = dict.fromkeys(self.steps[step]["note"] for step in present if "note" in self.steps[step])
        return found + list(notes) + self.busy(present) + [f"Not measured: {', '.join(missing)}."] * bool(missing)

    def busy(self, steps):
        """Of a machine that others used, in the moment before a step or while it ran."""
        shares = {step: max(self.steps[step].get(key, 0) for key in ("others_before", "others")) for step in steps}
        busy = {step: share for step, share in shares.items() if share >= BUSY}
        if not busy:
            return []
        whom = f" ({', '.join(busy)}), at most" if len(steps) > 1 else ""
        return [f"Busy{whom}: {100 * max(busy.values()):.0f} %."]

    def differing_runs(self, steps):
        return len({self.steps[step]["run"] for step in steps if self.has(step)}) > 1


def short(value):
    """Of how many times as long: 412, 12, 8.9."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def size_text(count):
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def table(head, rows, align="---:"):
    return ["| " + " | ".join(head) + " |", "|---" + f"|{align}" * (len(head) - 1) + "|",
            *("| " + " | ".join(row) + " |" for row in rows)]


def with_remarks(results, steps, lines, *more):
    remarks = " ".join([*results.remarks(steps), *more])
    return lines + ([""] if remarks and lines else []) + textwrap.wrap(remarks, 120)


def machine_text(machine):
    words = [machine["cpu"], f"{machine['cores']} cores"]
    if machine.get("torch") == machine.get("libtorch"):
        machine = {**machine, "both": machine.get("torch"), "torch": None, "libtorch": None}
    for key, form in (("gpu", "{}"), ("l3_mib", "third-level cache of {} MiB"), ("memory_gib", "{} GiB"),
                      ("flags", "{}"), ("kernel", "Linux {}"), ("both", "libtorch and torch {}"),
                      ("libtorch", "libtorch {}"), ("torch", "torch {}"), ("open_mpi", "Open MPI {}"),
                      ("nccl", "NCCL {}"), ("cudnn", "cuDNN {}"), ("transformers", "transformers {}")):
        value = machine.get(key)
        if value:
            words.append(form.format(", ".join(value) if isinstance(value, list) else value))
    return ", ".join(words)


def runs_block(results):
    """What ran where. Of some figures only the commit that recorded them is known; the cell says so."""
    if not results.runs:
        return ["Not measured."]
    cells = [[str(number), machine_text(run["machine"]),
              ("recorded in " if run.get("commit_is") == "recorded in" else "") + run["commit"], run["date"]]
             for number, run in enumerate(results.runs, 1)]
    notes = [run["note"] for run in results.runs if "note" in run]
    if len(cells) == 1:
        _, machine, commit, date = cells[0]
        commit = commit if commit.startswith("recorded") else f"commit {commit}"
        return textwrap.wrap(" ".join([f"Machine: {machine}; {commit}, {date}.", *notes]), 120)
    lines = table(["run", "machine", "commit", "date"], cells, align="---")
    return lines + [""] * bool(notes) + textwrap.wrap(" ".join(notes), 120)


def rows_of_steps(results, steps, head, cells, *remarks):
    """A row for each step, with the number of its run where the steps are of several runs."""
    steps = dict(steps)
    differ = results.differing_runs(steps)
    rows = [[label, *cells(step)] + [str(results.steps[step]["run"])] * differ
            for step, label in steps.items() if results.has(step)]
    return with_remarks(results, steps, table(head + ["run"] * differ, rows) if rows else [], *remarks)


def speed_cells(results, step, ranks, keys):
    get = lambda who, key: results.figure(step, f"{ranks}.{who}.{key}")
    return [f"{get('torch', 'tokens_per_s'):.0f}", f"{get('phalanx', 'tokens_per_s'):.0f}",
            *(f"{get('ratio', key):.2f}" for key in keys)]


def losses(results, rows):
    """Over the rows (label, step, ranks) whose difference is recorded; names the others."""
    known, unknown = [], []
    for label, step, ranks in rows:
        name = f"{ranks}.loss_difference"
        if results.has_figure(step, name, "high"):
            known.append(results.figure(step, name, "high"))
        elif results.has(step):
            unknown.append(label)
    if not known:
        return []
    but = f"; not recorded for {', '.join(unknown)}" if unknown else ""
    return [f"Losses differ by {max(known):.1e} at most{but}.".replace("e-0", "e-")]


SPEED_HEAD = ["torch, tokens/s", "Phalanx, tokens/s", "ratio", "CPU time", "PSS"]


def ddp_block(results):
    step = "ddp_5M"
    rows = [[str(ranks), *speed_cells(results, step, ranks, ("tokens_per_s", "cpu_ms", "pss_mib")),
             f"{results.figure(step, f'{ranks}.phalanx.first_step_s'):.2f}, "
             f"torch {results.figure(step, f'{ranks}.torch.first_step_s'):.2f}"]
            for ranks in (1, 2)] if results.has(step) else []
    head = ["ranks", *SPEED_HEAD, "start to first step done, s"]
    return with_remarks(results, [step], table(head, rows) if rows else [],
                        *losses(results, [(f"{ranks} ranks", step, ranks) for ranks in (1, 2)]))


SHARDED = {"fsdp_5M": "ZeRO-3 beside FSDP2, 5M", "fsdp_48M": "ZeRO-3 beside FSDP2, 48M",
           "zero1_5M": "ZeRO-1 beside ZeroRedundancyOptimizer, 5M"}
SPLIT = {"tp_5M": "tp, 2, 5M", "tp_48M": "tp, 2, 48M", "fsdp_tp_5M": "fsdp_tp, 2 x 2, 5M",
         "pp_1F1B_5M": "pp 1F1B, 2, 5M", "pp_ZBV_5M": "pp ZBV, 2, 5M"}


def split_ranks(step):
    return 4 if step == "fsdp_tp_5M" else 2


def sharded_block(results):
    keys = ("tokens_per_s", "cpu_ms", "pss_mib", "peak_rss_mib")
    return rows_of_steps(results, SHARDED, ["two ranks", *SPEED_HEAD, "peak RSS"],
                         lambda step: speed_cells(results, step, 2, keys),
                         *losses(results, [(label, step, 2) for step, label in SHARDED.items()]))


def split_block(results):
    share = []
    if results.has("tp_5M") and results.has_figure("tp_5M", "2.share_of_one_rank"):
        share = ["Two ranks of `tp` reach %.2f of twice the speed of one rank."
                 % results.figure("tp_5M", "2.share_of_one_rank")]
    keys = ("tokens_per_s", "cpu_ms", "pss_mib")
    return rows_of_steps(results, SPLIT, ["mode, ranks, model", *SPEED_HEAD],
                         lambda step: speed_cells(results, step, split_ranks(step), keys),
                         *losses(results, [(label, step, split_ranks(step)) for step, label in SPLIT.items()]), *share)


def simulation_block(results):
    step = "pipeline_simulation"
    rows = [[schedule, f"{results.figure(step, schedule + '.executed/simulated'):.3f}",
             f"{results.figure(step, schedule + '.of_the_stages_rate'):.1f} %"]
            for schedule in ("1F1B", "ZBV")] if results.has(step) else []
    head = ["schedule", "executed / simulated", "of the rate of the stages alone"]
    return with_remarks(results, [step], table(head, rows) if rows else [])


def exposed_block(step):
    def block(results):
        def cells(layout):
            get = lambda name: results.figure(step, f"{layout}.{name}")
            ms = lambda value: f"{value:.0f}" if value >= 10 else f"{value:.1f}"
            return [layout, ms(get("step")), ms(get("communication")), ms(get("exposed")), f"{get('of_step'):.1f} %"]
        rows = [cells(layout) for layout in ("DDP", "ZeRO-1", "ZeRO-3")] if results.has(step) else []
        head = ["", "step, ms", "communication, ms", "exposed, ms", "of the step"]
        return with_remarks(results, [step], table(head, rows) if rows else [])
    return block


def overlap_block(results):
    step = "overlap_slow_link"
    parts = ("median", "low", "high")
    rows = [[label, *(f"{results.figure(step, key + '.of_the_longer', part):.2f}" for part in parts)]
            for key, label in (("at_once", "at the same time"), ("in_turns", "one after the other"))
            if results.has(step)]
    head = ["times the longer one", "median", "least", "most"]
    return with_remarks(results, [step], table(head, rows) if rows else [])


def startup_block(results):
    def cells(step):
        ours = [results.figure(step, "phalanx launch", part) for part in ("median", "low", "high")]
        return ["%.2f (%.2f to %.2f)" % tuple(ours), short(results.figure(step, "torchrun"))]
    head = ["ranks", "`phalanx launch`, s", "torchrun, s"]
    return rows_of_steps(results, {"startup_2": "2", "startup_8": "8"}, head, cells)


def collectives_block(step, peer, backends, sizes):
    def block(results):
        def cell(name):  # of two runs the lower one is quoted
            return short(results.figure(step, name, "median" if results.has_figure(step, name) else "low"))
        rows = [[size_text(size)] + [", ".join(cell(f"{op}.{size}.{peer}/{backend}") for backend in backends)
                                     for op in OPS]
                for size in sizes] if results.has(step) else []
        return with_remarks(results, [step], table(["bytes", *OPS], rows) if rows else [])
    return block


GPU_MODELS = {"llama_1.5B": "Llama, 1.5 B parameters", "llama_3_8B_6_blocks": "6 blocks of Llama 3 8B"}


def gpu_training_block(results):
    step = "training"
    def cells(model):
        get = lambda name: results.figure(step, f"{model}.{name}")
        speed, memory = get("phalanx.tokens_per_s"), get("phalanx.memory")
        float8, bfloat16 = (results.figure("float8", f"{model}.{name}") for name in ("tensorwise", "bfloat16"))
        return [f"{speed:,.0f}", f"{speed / get('eager.tokens_per_s'):.2f}",
                f"{speed / get('compiled.tokens_per_s'):.2f}", f"{get('phalanx.mfu'):.1f} %",
                f"{float8 / bfloat16:.2f}",
                f"{memory / get('eager.memory'):.2f}, {memory / get('compiled.memory'):.2f}"]
    head = ["model", "Phalanx, tokens/s", "of PyTorch eager", "of torch.compile", "MFU", "float8 of bfloat16",
            "memory, of eager, of compiled"]
    rows = [[label, *cells(model)] for model, label in GPU_MODELS.items()] if results.has(step) else []
    return with_remarks(results, [step, "float8"], table(head, rows) if rows else [])


def gpu_generation_block(results):
    step = "generation"
    def cells(prompts):
        get = lambda who, part: results.figure(step, f"{prompts}.{who}.{part}")
        of = lambda part: get("phalanx", part) / get("transformers", part)
        return [str(prompts), f"{get('phalanx', 'decoding'):,.0f}", short(of("decoding")), f"{of('prefill'):.2f}"]
    head = ["prompts at a time", "decoding, tokens/s", "of transformers", "prefill, of transformers"]
    rows = [cells(1), cells(32)] if results.has(step) else []
    return with_remarks(results, [step], table(head, rows) if rows else [])


KIB, MIB = 1 << 10, 1 << 20
# Name: the file of benchmarks/results that the block is made of, and what makes it.
BLOCKS = {
    "cpu_runs": ("cpu", runs_block),
    "ddp": ("cpu", ddp_block),
    "sharded": ("cpu", sharded_block),
    "split": ("cpu", split_block),
    "pipeline_simulation": ("cpu", simulation_block),
    "exposed_shared_memory": ("cpu", exposed_block("exposed_shared_memory")),
    "exposed_slow_link": ("cpu", exposed_block("exposed_slow_link")),
    "overlap_slow_link": ("cpu", overlap_block),
    "startup": ("cpu", startup_block),
    "collectives_c10d": ("cpu", collectives_block("collectives_c10d", "c10d", ("shm", "heap", "gloo"),
                                                  (4 * KIB, 64 * KIB, MIB, 64 * MIB))),
    "collectives_open_mpi": ("cpu", collectives_block("collectives_open_mpi", "openmpi", ("shm", "heap"),
                                                      (64 * KIB, MIB, 4 * MIB, 64 * MIB))),
    "gpu_runs": ("h200", runs_block),
    "gpu_training": ("h200", gpu_training_block),
    "gpu_generation": ("h200", gpu_generation_block),
}


def check_marks(text, blocks):
    """Each block is there once, and ends before the next one begins."""
    begun, named = None, []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"docs/benchmarks.md:{number}"
        mark = MARK.fullmatch(line)
        if not mark:
            continue
        if mark[1] is None:
            if begun is None:
                raise Trouble(f"{where}: expected '<!-- figures: NAME -->' before '<!-- end -->', found none: delete "
                              "the second, or put the first where the table begins")
            begun = None
            continue
        if begun is not None:
            raise Trouble(f"{where}: expected '<!-- end -->' of the table {begun}, found the beginning of {mark[1]}: "
                          "put the mark where the table ends")
        if mark[1] not in blocks:
            raise Trouble(f"{where}: the marker 'figures: {mark[1]}' names no table; expected one of "
                          f"{', '.join(blocks)}: mend the name")
        begun = mark[1]
        named.append(begun)
    if begun is not None:
        raise Trouble(f"docs/benchmarks.md: expected '<!-- end -->' of the table {begun}, found the end of the page: "
                      "put the mark where the table ends")
    for name in blocks:
        if named.count(name) != 1:
            raise Trouble(f"docs/benchmarks.md: expected '<!-- figures: {name} -->' once, found it {named.count(name)} "
                          "times: put it, and '<!-- end -->', where the table belongs")


def filled_page(text, all_results, blocks=None):
    """The page with each block made anew. all_results: {file: Results}."""
    blocks = BLOCKS if blocks is None else blocks
    check_marks(text, blocks)

    def made(match):
        file, make = blocks[match[1]]
        return f"<!-- figures: {match[1]} -->\n\n" + "\n".join(make(all_results[file])) + "\n\n<!-- end -->\n"
    return BLOCK.sub(made, text)


def differing_blocks(text, filled):
    return [name for (name, was), (_, now) in zip(BLOCK.findall(text), BLOCK.findall(filled)) if was != now]
