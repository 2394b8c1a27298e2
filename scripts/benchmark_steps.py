"""The measurements of docs/benchmarks.md: what each runs, and how its output becomes figures. scripts/benchmarks.py
runs them.

A reader takes what a program printed and the file of its --json, and returns {name: (unit, [values])}: a value for each
round, or one that the program has already made of its rounds. Names are made of words with a dot between them.
"""
import dataclasses
import json
import re
import typing

OPS = ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all")
UNITS = {"tokens_per_s": "tokens/s", "cpu_ms": "ms of CPU time a step", "pss_mib": "MiB", "peak_rss_mib": "MiB",
         "first_step_s": "s"}


@dataclasses.dataclass
class Step:
    name: str
    what: str
    command: list              # {bin}, {python}, {peers}, {json} and the names in `full` are filled in
    read: typing.Callable
    minutes: float             # on two cores with nothing else to do
    full: dict                 # "runs": how often the command runs
    quick: dict                # the fewest repetitions
    needs: tuple = ()          # of torch, peers, mpirun; without them the step is skipped

    programs: tuple = ()       # of --bin, those that the command does not name

    def limit_seconds(self):
        """Of the step, all its runs together."""
        return 180 + 60 * 4 * self.minutes

    def all_programs(self):
        """Paths from --bin."""
        named = [word.removeprefix("{bin}/") for word in self.command if word.startswith("{bin}/")]
        return [*named, *self.programs]


def table_rows(text):
    """The cells of the rows of Markdown tables, without their heads."""
    rows, head = [], True
    for line in text.splitlines():
        if not line.startswith("|"):
            head = True
        elif re.fullmatch(r"[| :-]+", line):
            head = False
        elif not head:
            rows.append([cell.strip() for cell in line.strip("| \n").split("|")])
    return rows


def number(cell):
    return float(cell.rstrip(" %"))


def read_comparison(_text, data):
    """Of scripts/compare_with_torch.py. Ratios are of the two runs of one round."""
    data = json.loads(data)
    runs, figures, one_rank = data["runs"], {}, None
    for row in data["rows"]:
        ranks = row["ranks"]
        torch, ours = runs[f"torch, {ranks} ranks"], runs[f"phalanx, {ranks} ranks"]
        for key, unit in UNITS.items():
            figures[f"{ranks}.torch.{key}"] = unit, [run[key] for run in torch]
            figures[f"{ranks}.phalanx.{key}"] = unit, [run[key] for run in ours]
            figures[f"{ranks}.ratio.{key}"] = "", [b[key] / a[key] for a, b in zip(torch, ours)]
        figures[f"{ranks}.loss_difference"] = "", [row["max_loss_difference"]]
        if ranks == 1:
            one_rank = [run["tokens_per_s"] for run in ours]
        elif one_rank:
            figures[f"{ranks}.share_of_one_rank"] = "", [
                run["tokens_per_s"] / (ranks * one) for run, one in zip(ours, one_rank)]
    return figures


def read_collectives(peer):
    """Of `collectives` and `phalanx bench comm`: microseconds, and how many times as long the peer takes."""
    def read(_text, data):
        figures, rows = {}, json.loads(data)["rows"]
        times = {(row["op"], row["bytes"], row["backend"]): row["p50_us"] for row in rows}
        for (op, size, backend), us in times.items():
            figures[f"{op}.{size}.{backend}"] = "us", [us]
            if backend != peer:
                figures[f"{op}.{size}.{peer}/{backend}"] = "", [times[op, size, peer] / us]
        return figures
    return read


def read_simulation(text, _data):
    figures = {}
    for schedule, makespan, simulated, replayed, rate in table_rows(text):
        figures[f"{schedule}.makespan"] = "ms", [number(makespan)]
        figures[f"{schedule}.executed/simulated"] = "", [number(simulated)]
        figures[f"{schedule}.executed/replayed"] = "", [number(replayed)]
        figures[f"{schedule}.of_the_stages_rate"] = "%", [number(rate)]
    return figures


def read_exposed(text, _data):
    """Of both programs: over the slow link there are two columns more."""
    figures = {}
    for layout, step, *more, communication, exposed, of_step, of_communication in table_rows(text):
        cells = {"step": step, **dict(zip(("computing", "link_alone"), more, strict=bool(more))),
                 "communication": communication, "exposed": exposed, "of_step": of_step,
                 "of_communication": of_communication}
        for name, cell in cells.items():
            figures[f"{layout}.{name}"] = "%" if name.startswith("of_") else "ms", [number(cell)]
    return figures


def read_overlap(text, _data):
    figures = {}
    for name, ms, ratio in re.findall(r"^(one after the other|both at once) +([0-9.]+) ms +([0-9.]+) x", text, re.M):
        key = "at_once" if name.startswith("both") else "in_turns"
        figures[f"{key}.time"] = "ms", [float(ms)]
        figures[f"{key}.of_the_longer"] = "", [float(ratio)]
    return figures


def read_startup(_text, data):
    """The program has the median, the least and the most of its runs."""
    data = json.loads(data)
    return {name: ("s", [data[name][key] for key in ("min_s", "median_s", "max_s")])
            for name in ("phalanx launch", "torchrun") if name in data}


def comparison(name, what, minutes, options, rounds=3, steps=12):
    return Step(name, what,
                ["{python}", "scripts/compare_with_torch.py", "--peers", "{peers}", "--program", "{bin}/phalanx",
                 "--rounds", "{rounds}", "--steps", "{steps}", *options.split(), "--json", "{json}"],
                read_comparison, minutes, {"rounds": rounds, "steps": steps}, {"rounds": 1, "steps": 4},
                ("torch", "peers"))


def startup(ranks, minutes):
    return Step(f"startup_{ranks}", f"start-up of {ranks} ranks beside torchrun",
                ["{python}", "benchmarks/startup.py", "--bin", "{bin}", "--ranks", str(ranks), "--repeats", "{repeats}",
                 "--json", "{json}"],
                read_startup, minutes, {"repeats": 5}, {"repeats": 1}, ("torch",), ("phalanx", "launch_test_worker"))


def collectives(name, peer, what, minutes, backends, sizes, needs):
    """The program starts its ranks by mpirun."""
    return Step(name, what,
                ["{bin}/collectives", "--ranks", "2", "--backends", backends, "--ops", ",".join(OPS), "--sizes", sizes,
                 "--rounds", "{rounds}", "--budget-s", "{budget}", "--copy", "0", "--json", "{json}"],
                read_collectives(peer), minutes, {"runs": 3, "rounds": 3, "budget": 0.2},
                {"runs": 1, "rounds": 1, "budget": 0.01}, needs)


STEPS = [
    comparison("ddp_5M", "one rank, and DDP on two, beside PyTorch", 3, "--ranks 1 2"),
    comparison("fsdp_5M", "ZeRO-3 beside FSDP2, two ranks", 1.5, "--ranks 2 --mode fsdp"),
    comparison("fsdp_48M", "the same with model 48M", 5, "--ranks 2 --mode fsdp --model 48M", steps=7),
    comparison("zero1_5M", "ZeRO-1 beside ZeroRedundancyOptimizer, two ranks", 1.5, "--ranks 2 --mode zero1"),
    comparison("tp_5M", "tensor parallelism beside DTensor, one and two ranks", 3, "--ranks 1 2 --mode tp"),
    comparison("tp_48M", "the same with model 48M, two ranks", 5, "--ranks 2 --mode tp --model 48M", steps=7),
    comparison("fsdp_tp_5M", "ZeRO-3 x tensor parallelism beside FSDP2 x DTensor, 2 x 2 ranks", 2.5,
               "--ranks 4 --mode fsdp_tp"),
    comparison("pp_1F1B_5M", "a pipeline by 1F1B beside torch.distributed.pipelining, two ranks", 1.5,
               "--ranks 2 --mode pp --schedule 1F1B"),
    comparison("pp_ZBV_5M", "the same by ZBV", 1.5, "--ranks 2 --mode pp --schedule ZBV"),
    Step("pipeline_simulation", "pipeline steps beside their simulation",
         ["{python}", "scripts/pipeline_timeline.py", "--program", "{bin}/phalanx", "--steps", "{steps}"],
         read_simulation, 2, {"runs": 3, "steps": 10}, {"runs": 1, "steps": 3}),
    Step("exposed_shared_memory", "exposed communication through shared memory",
         ["{python}", "benchmarks/exposed_shared_memory.py", "--program", "{bin}/phalanx", "--rounds", "1",
          "--steps", "{steps}"],
         read_exposed, 2.5, {"runs": 3, "steps": 14}, {"runs": 1, "steps": 4}),
    Step("exposed_slow_link", "exposed communication over a link of 1 Gbit/s; needs root",
         ["benchmarks/exposed_slow_link.sh", "--program", "{bin}/phalanx", "--steps", "{steps}"],
         read_exposed, 7, {"runs": 3, "steps": 4}, {"runs": 1, "steps": 3}),
    Step("overlap_slow_link", "an all_reduce and matrix products at the same time, over such a link; needs root",
         ["benchmarks/overlap_slow_link.sh", "--program", "{bin}/../recipes/overlap"],
         read_overlap, 1, {"runs": 3}, {"runs": 1}),
    startup(2, 1),
    startup(8, 2),
    collectives("collectives_c10d", "c10d", "collectives beside c10d's gloo", 7, "shm,heap,gloo,c10d",
                "4K,64K,1M,4M,64M", ("mpirun",)),
    collectives("collectives_open_mpi", "openmpi", "collectives beside Open MPI", 4, "heap,shm,openmpi",
                "64K,1M,4M,16M,64M", ("mpirun",)),
]
