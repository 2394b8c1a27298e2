#!/usr/bin/env python3
"""Compares `phalanx train` with a PyTorch program on the same model, weights, tokens and threads.

    scripts/compare_with_torch.py --peers DIR [--program build/release/bin/phalanx] [--rounds 3] [--json FILE]

DIR holds train.py, a plain PyTorch program that takes --mode single|ddp, --init-from, --save-init, --tokens,
--save-tokens, --steps, --batch and --threads and closes with one JSON line (losses, step_ms, cpu_ms_per_step, pss_mib,
startup_from_launch_s). The runs alternate, round by round, so that a disturbance of the machine does not fall on one of
them. Wall times on a busy machine mean little: the table also has the CPU time of a step, summed over the ranks.

The model is the 5M flavor: dim 256, 4 layers, 4/2 heads, ffn 688, vocabulary 4096, sequences of 256 tokens; or, with
--model 48M, dim 512, 8 layers, 8/4 heads, ffn 2048, vocabulary 16384. The step is AdamW, learning rate 1e-3 constant,
betas 0.9 and 0.95, decay 0.1 on every parameter, gradients clipped to norm 1. Several ranks run data parallel; --mode
zero1 or fsdp shards instead: ZeroRedundancyOptimizer and FSDP2 there, ZeRO-1 and ZeRO-3 here. --mode tp is tensor parallel over all
ranks, with sequence and loss parallelism on both sides; fsdp_tp over two, sharded over the rest (--ranks 4). --mode pp is a pipeline of four micro-batches, by --schedule.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

BATCH, SEQ, SKIP = 8, 256, 3
MODELS = {"5M": {}, "48M": {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "ffn_hidden": 2048,
                            "vocab_size": 16384}}
# What each mode says in our configuration. "all": the ranks.
TENSOR = 2
MICRO_BATCHES = 4
MODES = {"ddp": {}, "zero1": {"data_parallel_shard_degree": -1, "zero_stage": 1},
         "fsdp": {"data_parallel_shard_degree": -1, "zero_stage": 3},
         "tp": {"tensor_parallel_degree": "all"},
         "fsdp_tp": {"data_parallel_shard_degree": -1, "zero_stage": 3, "tensor_parallel_degree": TENSOR},
         "pp": {"pipeline_parallel_degree": "all", "pipeline_parallel_microbatch_size": BATCH // MICRO_BATCHES}}


def degree(mode, ranks, key):
    value = MODES[mode].get(f"{key}_parallel_degree", 1)
    return ranks if value == "all" else value


def environment(threads):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GLIBC_TUNABLES", "OMP_", "GOMP_", "MKL_"))}
    env["OMP_NUM_THREADS"] = str(threads)
    return env


def run(command, env):
    done = subprocess.run([str(c) for c in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nended with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def run_torch(args, ranks, work, first):
    env = environment(args.threads)
    train = args.peers / "train.py"
    flags = ["--steps", args.steps, "--batch", BATCH, "--skip", SKIP, "--threads", args.threads, "--quiet"]
    for key, value in MODELS[args.model].items():
        flags += ["--vocab" if key == "vocab_size" else "--" + key.replace("_", "-"), value]
    if first:
        flags += ["--save-init", work / "init.safetensors", "--save-tokens", work / "data.tokens"]
    else:
        flags += ["--init-from", work / "init.safetensors", "--tokens", work / "data.tokens"]
    if ranks == 1:
        command = [args.python, train, "--mode", "single", *flags]
    else:
        command = [args.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, train, "--mode",
                   args.mode, *flags]
        if degree(args.mode, ranks, "tensor") > 1:
            command += ["--tp", degree(args.mode, ranks, "tensor"), "--loss-parallel"]
        if args.mode == "pp":
            command += ["--pp-schedule", args.schedule.lower(), "--microbatches", MICRO_BATCHES]
    env["PEER_T0"] = repr(time.time())
    out = run(command, env)
    result = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    return {"losses": result["losses"], "tokens_per_s": result["tokens_per_s"],
            "cpu_ms": sum(result["cpu_ms_per_step"]), "pss_mib": max(result["pss_mib"]), "peak_rss_mib": max(result["peak_rss_mib"]),
            "first_step_s": result["startup_from_launch_s"] or result["startup_s"]}


def phalanx_command(args, ranks, work, folder, local_batch):
    keys = {"job.dump_folder": folder, "model.flavor": "5M", "training.dataset_path": work / "data.tokens",
            "training.seq_len": SEQ, "training.local_batch_size": local_batch, "training.steps": args.steps,
            "training.shuffle": "false", "training.max_norm": 1.0, "optimizer.lr": 1e-3, "optimizer.eps": 1e-8,
            "lr_scheduler.warmup_steps": 0, "lr_scheduler.decay_ratio": 0, "checkpoint.enable": "false",
            "checkpoint.initial_load_path": work / "init.safetensors", "checkpoint.initial_load_in_hf": "true",
            "metrics.enable_tensorboard": "false", "metrics.enable_report": "false"}
    keys.update({f"model.{key}": value for key, value in MODELS[args.model].items()})
    if ranks > 1:
        keys.update({f"parallelism.{key}": ranks if value == "all" else value
                     for key, value in MODES[args.mode].items()})
        if args.mode == "pp":
            keys["parallelism.pipeline_parallel_schedule"] = args.schedule
    config = work / f"{folder.name}.toml"
    config.write_text("")
    command = [args.program, "train", *(["-n", ranks] if ranks > 1 else []), config]
    return command + [f"--{key}={value}" for key, value in keys.items()]


def steps_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run_phalanx(args, ranks, work):
    folder = work / f"run{ranks}"
    begin = time.time()
    cut = degree(args.mode, ranks, "tensor") * degree(args.mode, ranks, "pipeline")
    data_ranks = ranks // cut if ranks > 1 else 1
    run(phalanx_command(args, ranks, work, folder, BATCH // data_ranks), environment(args.threads))
    steps = steps_of(folder)
    described = json.loads((folder / "run.json").read_text())
    timed = steps[SKIP:]
    return {"losses": [s["loss"] for s in steps],
            "seconds": [s["seconds"] for s in timed],
            "tokens_per_s": BATCH * SEQ / statistics.median(s["seconds"] for s in timed),
            "cpu_ms": 1e3 * statistics.median(sum(s["cpu_seconds"]) for s in timed),
            "pss_mib": max(described["pss_mib"]), "peak_rss_mib": max(described["peak_rss_mib"]),
            "first_step_s": steps[0]["time"] - begin}


def run_side_by_side(args, jobs, work):
    """Jobs of one rank each, at once and with nothing to tell each other: what the machine leaves to that many ranks.
    Returns the steps' seconds, and the same if every step lasted as long as the slowest job's step of that number."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        folders = [work / f"alone{job}" for job in range(jobs)]
        list(pool.map(lambda folder: run(phalanx_command(args, 1, work, folder, BATCH // jobs),
                                         environment(args.threads)), folders))
    seconds = [[s["seconds"] for s in steps_of(folder)[SKIP:]] for folder in folders]
    return [s for job in seconds for s in job], [max(step) for step in zip(*seconds)]


def compare_ranks(args, work):
    """Prints, round by round, our tokens/s on each number of ranks and its share of that many times the first's; and the
    shares of as many jobs of one rank, which bound what any communication, however fast, leaves possible here. At the end
    all rounds' steps together: their medians, and their fastest tenths, which other programs and virtual machines have
    disturbed least."""
    first = args.ranks[0]
    kinds = ("share", "of jobs of one rank", "of these, in step with the slowest")
    base_steps, steps, shares = [], {}, {}
    for number in range(args.rounds):
        base = run_phalanx(args, first, work)["seconds"]
        base_steps += base
        print(f"round {number + 1}: {first} rank(s) {BATCH * SEQ / statistics.median(base):.0f} tokens/s", flush=True)
        for ranks in args.ranks[1:]:
            columns = run_phalanx(args, ranks, work)["seconds"], *run_side_by_side(args, ranks, work)
            ideal = statistics.median(base) * first / ranks
            values = [ideal / statistics.median(column) for column in columns]
            shares.setdefault(ranks, []).append(values)
            for pool, column in zip(steps.setdefault(ranks, ([], [], [])), columns):
                pool += column
            print(f"  {ranks} ranks {BATCH * SEQ / statistics.median(columns[0]):.0f} tokens/s: share {values[0]:.3f}; "
                  f"{ranks} jobs of one rank: {values[1]:.3f}, in step with the slowest {values[2]:.3f}", flush=True)

    def fastest_tenth(seconds):
        return sorted(seconds)[len(seconds) // 10]

    for ranks in shares:
        for name, column, pool in zip(kinds, zip(*shares[ranks]), steps[ranks]):
            together = [of(base_steps) * first / ranks / of(pool) for of in (statistics.median, fastest_tenth)]
            print(f"{ranks} ranks: {name}: {min(column):.3f} to {max(column):.3f}, median {statistics.median(column):.3f}; "
                  f"all steps together: medians {together[0]:.3f}, fastest tenths {together[1]:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path, required=True, help="folder of the PyTorch program train.py")
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path("build/release/bin/phalanx"))
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mode", choices=sorted(MODES), default="ddp", help="of several ranks")
    parser.add_argument("--schedule", default="1F1B", help="of --mode pp: 1F1B, GPipe, Interleaved, ZBV, ...")
    parser.add_argument("--model", choices=sorted(MODELS), default="5M")
    parser.add_argument("--ours-alone", action="store_true",
                        help="torch makes weights and tokens only: prints our tokens/s, the share of one rank's, "
                             "and the shares of as many jobs of one rank at once")
    parser.add_argument("--json", type=pathlib.Path, help="write all figures to this file")
    args = parser.parse_args()

    results = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-compare-") as folder:
        work = pathlib.Path(folder)
        run_torch(args, 1, work, first=True)  # makes weights and tokens; not counted
        if args.ours_alone:
            return compare_ranks(args, work)
        for number in range(args.rounds):
            for ranks in args.ranks:
                for name, runner in (("torch", lambda: run_torch(args, ranks, work, first=False)),
                                     ("phalanx", lambda: run_phalanx(args, ranks, work))):
                    result = runner()
                    results.setdefault((ranks, name), []).append(result)
                    print(f"round {number + 1}, {ranks} rank(s), {name}: {result['tokens_per_s']:.0f} tokens/s, "
                          f"{result['cpu_ms']:.0f} ms CPU a step, first step after {result['first_step_s']:.2f} s",
                          file=sys.stderr, flush=True)

    def median(ranks, name, key):
        return statistics.median(r[key] for r in results[ranks, name])

    rows = []
    for ranks in args.ranks:
        pairs = zip(results[ranks, "torch"], results[ranks, "phalanx"])
        row = {"ranks": ranks,
               "max_loss_difference": max(abs(a - b) for t, p in pairs for a, b in zip(t["losses"], p["losses"]))}
        for key in ("tokens_per_s", "cpu_ms", "pss_mib", "peak_rss_mib", "first_step_s"):
            torch, ours = median(ranks, "torch", key), median(ranks, "phalanx", key)
            row[key] = {"torch": torch, "phalanx": ours, "ratio": ours / torch}
        rows.append(row)

    print(f"\n{args.rounds} rounds, {args.steps} steps, {args.threads} thread(s) a rank, medians\n")
    print("| ranks | | torch | Phalanx | Phalanx / torch |\n| --- | --- | --- | --- | --- |")
    names = {"tokens_per_s": ("tokens/s", "{:.0f}"), "cpu_ms": ("CPU ms a step, all ranks", "{:.0f}"),
             "pss_mib": ("PSS of the fullest rank, MiB", "{:.0f}"),
             "peak_rss_mib": ("peak RSS of the fullest rank, MiB", "{:.0f}"),
             "first_step_s": ("start to first step done, s", "{:.2f}")}
    for row in rows:
        for key, (name, form) in names.items():
            v = row[key]
            print(f"| {row['ranks']} | {name} | {form.format(v['torch'])} | {form.format(v['phalanx'])} | {v['ratio']:.2f} |")
        print(f"| {row['ranks']} | largest loss difference over {args.steps} steps | | {row['max_loss_difference']:.1e} | |")
    if 1 in args.ranks and len(args.ranks) > 1:
        for ranks in args.ranks[1:]:
            ratio = median(ranks, "phalanx", "tokens_per_s") / (ranks * median(1, "phalanx", "tokens_per_s"))
            print(f"| {ranks} | share of {ranks} x our one rank | | {ratio:.2f} | |")
    if args.json:
        runs = {f"{name}, {ranks} ranks": r for (ranks, name), r in results.items()}
        args.json.write_text(json.dumps({"rows": rows, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
