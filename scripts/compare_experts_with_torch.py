#!/usr/bin/env python3
"""Compares expert parallelism with a plain PyTorch program on the same mixture, weights, tokens and threads.

    scripts/compare_experts_with_torch.py [--program build/release/bin/phalanx] [--rounds 3] [--experts 8 --hidden 512]

benchmarks/peers/mixture.py is that program: a Mixtral whose experts are dealt out over gloo ranks. Both run on one rank
and on two, in turn, so that a disturbance of the machine does not fall on one of them; the shares say how much of twice
one rank's tokens/s two ranks reach. Needs a Python with torch, numpy and safetensors.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile

from compare_with_torch import BATCH, SEQ, SKIP, environment, run, steps_of

PEER = pathlib.Path(__file__).resolve().parent.parent / "benchmarks/peers/mixture.py"


def peer_flags(args):
    return ["--steps", args.steps, "--batch", BATCH, "--seq", SEQ, "--experts", args.experts, "--hidden", args.hidden,
            "--top-k", args.top_k]


def run_torch(args, ranks, work):
    start = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    out = run([args.python, *start, PEER, *peer_flags(args), "--init-from", work / "init", "--tokens", work / "tokens"],
              environment(1))
    result = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    return {"losses": result["losses"], "tokens_per_s": result["tokens_per_s"], "cpu_ms": sum(result["cpu_ms_per_step"])}


def run_phalanx(args, ranks, work):
    folder = work / f"run{ranks}"
    keys = {"job.dump_folder": folder, "model.flavor": "hf", "model.hf_assets_path": work / "init",
            "training.dataset_path": work / "tokens", "training.seq_len": SEQ,
            "training.local_batch_size": BATCH // ranks, "training.steps": args.steps, "training.shuffle": "false",
            "training.max_norm": 1.0, "optimizer.lr": 1e-3, "optimizer.eps": 1e-8, "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.decay_ratio": 0, "checkpoint.enable": "false",
            "checkpoint.initial_load_path": work / "init", "checkpoint.initial_load_in_hf": "true",
            "metrics.enable_tensorboard": "false", "metrics.enable_report": "false"}
    if ranks > 1:
        keys.update({"parallelism.data_parallel_shard_degree": ranks, "parallelism.expert_parallel_degree": ranks,
                     "parallelism.zero_stage": 1})
    config = work / "run.toml"
    config.write_text("")
    run([args.program, "train", "-n", ranks, config, *(f"--{key}={value}" for key, value in keys.items())], environment(1))
    steps = steps_of(folder)
    timed = steps[SKIP:]
    return {"losses": [s["loss"] for s in steps],
            "tokens_per_s": BATCH * SEQ / statistics.median(s["seconds"] for s in timed),
            "cpu_ms": 1e3 * statistics.median(sum(s["cpu_seconds"]) for s in timed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=pathlib.Path("build/release/bin/phalanx"))
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="width of an expert")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token")
    args = parser.parse_args()

    results = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-experts-") as folder:
        work = pathlib.Path(folder)
        run([args.python, PEER, *peer_flags(args), "--save-init", work / "init", "--save-tokens", work / "tokens"],
            environment(1))
        for _ in range(args.rounds):
            for ranks in (1, 2):
                for name, runner in (("torch", run_torch), ("phalanx", run_phalanx)):
                    results.setdefault((name, ranks), []).append(runner(args, ranks, work))

    def median(name, ranks, key):
        return statistics.median(result[key] for result in results[name, ranks])

    print(f"{args.experts} experts of 256 x {args.hidden}, {args.top_k} a token; one thread a rank; {args.rounds} rounds\n")
    print("| ranks | | torch | Phalanx | Phalanx / torch |\n| --- | --- | --- | --- | --- |")
    for ranks in (1, 2):
        for key, title in (("tokens_per_s", "tokens/s"), ("cpu_ms", "CPU ms a step, all ranks")):
            torch, ours = median("torch", ranks, key), median("phalanx", ranks, key)
            print(f"| {ranks} | {title} | {torch:.0f} | {ours:.0f} | {ours / torch:.2f} |")
        largest = max(abs(a - b) for t, p in zip(results["torch", ranks], results["phalanx", ranks])
                      for a, b in zip(t["losses"], p["losses"]))
        print(f"| {ranks} | largest difference of a loss | | {largest:.1e} | |")
    shares = [median(name, 2, "tokens_per_s") / (2 * median(name, 1, "tokens_per_s")) for name in ("torch", "phalanx")]
    print(f"| 2 | share of twice one rank | {shares[0]:.2f} | {shares[1]:.2f} | |")


if __name__ == "__main__":
    main()
