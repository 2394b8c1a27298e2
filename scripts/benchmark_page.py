"""The tables of docs/benchmarks.md, made from benchmarks/results/*.json. scripts/benchmarks.py writes both.

A file holds runs: {"runs": [{"machine": {...}, "commit": ..., "date": ..., "steps": {name: step}}]}. A step has its
command and its figures: {name: {"unit": ..., "median": ..., "low": ..., "high": ...}}. No two runs of a file have the
same step. On the page a table stands between <!-- figures: NAME --> and <!-- end -->.
"""
import json
import re
import textwrap

from benchmark_steps import OPS

BLOCK = re.compile(r"<!-- figures: (\S+) -->\n(.*?)<!-- end -->\n", re.S)


class Trouble(Exception):
    """What a user can mend: says what, where, what was expected and found, and what to do."""


class Results:
    """The runs of one file."""

    def __init__(self, path, runs):
        self.path, self.runs = path, runs
        self.steps = {}
        for number, run in enumerate(runs, 1):
            for name, step in run["steps"].items():
                if name in self.steps:
                    raise Trouble(f"{path}: run {number} has the step {name}, which an earlier run has, too; expected "
                                  "it once: delete the older one")
                self.steps[name] = dict(step, run=number)

    @staticmethod
    def read(path):
        try:
            return Results(path, json.loads(path.read_text())["runs"])
        except FileNotFoundError:
            raise Trouble(f"{path}: no such file; scripts/benchmarks.py writes it when it has measured") from None
        except (ValueError, KeyError, TypeError) as error:
            raise Trouble(f"{path}: expected JSON with \"runs\", found something else ({error}); take the committed "
                          f"one: git checkout {path}") from None

    def has(self, step):
        return step in self.steps

    def has_figure(self, step, name):
        return name in self.steps[step]["figures"]

    def figure(self, step, name, part="median"):
        figures = self.steps[step]["figures"]
        if part not in figures.get(name, {}):
            near = ", ".join(sorted(figures)[:6])
            raise Trouble(f"{self.path}: step {step} has no figure '{name}' with '{part}'; it has {near}, ...: measure "
                          f"it again: scripts/benchmarks.py --only {step}")
        return figures[name][part]

    def remarks(self, steps):
        """From which run a table is, where there are several, and what its steps say of themselves."""
        present = [step for step in steps if self.has(step)]
        if not present:
            return ["Not measured."]
        found = []
        if len(self.runs) > 1:
            numbers = {self.steps[step]["run"] for step in present}
            if len(numbers) == 1:
                found.append(f"Run {numbers.pop()}.")
        missing = [step for step in steps if step not in present]
        found += [self.steps[step]["note"] for step in present if "note" in self.steps[step]]
        return found + [f"Not measured: {', '.join(missing)}."] * bool(missing)

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
    for key, form in (("gpu", "{}"), ("l3_mib", "third-level cache of {} MiB"), ("memory_gib", "{} GiB"),
                      ("flags", "{}"), ("kernel", "Linux {}"), ("libtorch", "libtorch {}"), ("torch", "torch {}"),
                      ("open_mpi", "Open MPI {}"), ("nccl", "NCCL {}"), ("cudnn", "cuDNN {}"),
                      ("transformers", "transformers {}")):
        value = machine.get(key)
        if value:
            words.append(form.format(", ".join(value) if isinstance(value, list) else value))
    return ", ".join(words)


def runs_block(results):
    """What ran where. Of figures of which only the commit that recorded them is known, that is said."""
    commit = "recorded in commit" if any(run.get("commit_is") == "recorded in" for run in results.runs) else "commit"
    if len(results.runs) == 1:
        run = results.runs[0]
        return textwrap.wrap(f"Machine: {machine_text(run['machine'])}; {commit} {run['commit']}, {run['date']}.", 120)
    return table(["run", "machine", commit, "date"],
                 [[str(number), machine_text(run["machine"]), run["commit"], run["date"]]
                  for number, run in enumerate(results.runs, 1)], align="---")


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


def losses(results, steps):
    names = [(step, f"{ranks}.loss_difference") for step in steps if results.has(step) for ranks in (1, 2, 4)]
    values = [results.figure(*name) for name in names if results.has_figure(*name)]
    return [f"Losses differ by {max(values):.1e} at most.".replace("e-0", "e-")] if values else []


SPEED_HEAD = ["torch, tokens/s", "Phalanx, tokens/s", "ratio", "CPU time", "PSS"]


def ddp_block(results):
    step = "ddp_5M"
    rows = [[str(ranks), *speed_cells(results, step, ranks, ("tokens_per_s", "cpu_ms", "pss_mib")),
             f"{results.figure(step, f'{ranks}.phalanx.first_step_s'):.2f}, "
             f"torch {results.figure(step, f'{ranks}.torch.first_step_s'):.2f}"]
            for ranks in (1, 2)] if results.has(step) else []
    head = ["ranks", *SPEED_HEAD, "start to first step done, s"]
    return with_remarks(results, [step], table(head, rows) if rows else [], *losses(results, [step]))


SHARDED = {"fsdp_5M": "ZeRO-3 beside FSDP2, 5M", "fsdp_48M": "ZeRO-3 beside FSDP2, 48M",
           "zero1_5M": "ZeRO-1 beside ZeroRedundancyOptimizer, 5M"}
SPLIT = {"tp_5M": "tp, 2, 5M", "tp_48M": "tp, 2, 48M", "fsdp_tp_5M": "fsdp_tp, 2 x 2, 5M",
         "pp_1F1B_5M": "pp 1F1B, 2, 5M", "pp_ZBV_5M": "pp ZBV, 2, 5M"}


def sharded_block(results):
    keys = ("tokens_per_s", "cpu_ms", "pss_mib", "peak_rss_mib")
    return rows_of_steps(results, SHARDED, ["two ranks", *SPEED_HEAD, "peak RSS"],
                         lambda step: speed_cells(results, step, 2, keys), *losses(results, SHARDED))


def split_block(results):
    share = []
    if results.has("tp_5M") and results.has_figure("tp_5M", "2.share_of_one_rank"):
        share = ["Two ranks of `tp` reach %.2f of twice the speed of one rank."
                 % results.figure("tp_5M", "2.share_of_one_rank")]
    keys = ("tokens_per_s", "cpu_ms", "pss_mib")
    return rows_of_steps(results, SPLIT, ["mode, ranks, model", *SPEED_HEAD],
                         lambda step: speed_cells(results, step, 4 if step == "fsdp_tp_5M" else 2, keys),
                         *losses(results, SPLIT), *share)


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
        return ["%.2f (%.2f to %.2f)" % tuple(ours), f"{results.figure(step, 'torchrun'):.1f}"]
    head = ["ranks", "`phalanx launch`, s", "torchrun, s"]
    return rows_of_steps(results, {"startup_2": "2", "startup_8": "8"}, head, cells)


def collectives_block(step, peer, backends, sizes):
    def block(results):
        rows = [[size_text(size)] + [", ".join(short(results.figure(step, f"{op}.{size}.{peer}/{backend}"))
                                               for backend in backends) for op in OPS]
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
    return with_remarks(results, [step], table(head, [[label, *cells(model)] for model, label in GPU_MODELS.items()]))


def gpu_generation_block(results):
    step = "generation"
    def cells(prompts):
        get = lambda who, part: results.figure(step, f"{prompts}.{who}.{part}")
        of = lambda part: f"{get('phalanx', part) / get('transformers', part):.2f}"
        return [str(prompts), f"{get('phalanx', 'decoding'):,.0f}", of("decoding"), of("prefill")]
    head = ["prompts at a time", "decoding, tokens/s", "of transformers", "prefill, of transformers"]
    return with_remarks(results, [step], table(head, [cells(1), cells(32)]))


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
                                                  (4 * KIB, 64 * KIB, MIB, 4 * MIB, 64 * MIB))),
    "collectives_open_mpi": ("cpu", collectives_block("collectives_open_mpi", "openmpi", ("shm", "heap"),
                                                      (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB))),
    "gpu_runs": ("h200", runs_block),
    "gpu_training": ("h200", gpu_training_block),
    "gpu_generation": ("h200", gpu_generation_block),
}


def filled_page(text, all_results, blocks=None):
    """The page with each block made anew. all_results: {file: Results}."""
    blocks = BLOCKS if blocks is None else blocks
    named = re.findall(r"<!-- figures: (\S+) -->", text)
    for name in named:
        if name not in blocks:
            raise Trouble(f"docs/benchmarks.md: the marker 'figures: {name}' names no table; expected one of "
                          f"{', '.join(blocks)}")
    for name in blocks:
        if named.count(name) != 1 or [found[0] for found in BLOCK.findall(text)].count(name) != 1:
            raise Trouble(f"docs/benchmarks.md: expected '<!-- figures: {name} -->' once, followed by '<!-- end -->'; "
                          f"found the first {named.count(name)} times: put both where the table belongs")

    def made(match):
        file, make = blocks[match[1]]
        return f"<!-- figures: {match[1]} -->\n\n" + "\n".join(make(all_results[file])) + "\n\n<!-- end -->\n"
    return BLOCK.sub(made, text)


def differing_blocks(text, filled):
    return [name for (name, was), (_, now) in zip(BLOCK.findall(text), BLOCK.findall(filled)) if was != now]
