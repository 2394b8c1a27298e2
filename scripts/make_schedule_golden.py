#!/usr/bin/env python3
"""Writes phalanx/schedule/testdata/schedule_golden.txt: the pipeline schedules that torch generates.

    .venv/bin/python scripts/make_schedule_golden.py

A line `NAME RANKS STAGES_PER_RANK MICRO_BATCHES PASSES TRANSFERS ALL` for each size. PASSES is the FNV-1a hash of the
CSV form (a line a rank, no idle slots) of the passes, `refused` where torch refuses the size; TRANSFERS that of
the same with SEND and RECV placed; ALL with UNSHARD, RESHARD and REDUCE_GRAD, too, for up to 8 stages (torch resets more
of them in the order of a hash table). A few follow in full, each after a line `full NAME ...`.

torch's 1F1B and GPipe have no list of actions that they follow: a stage that only takes notes records them.
"""
import pathlib
from unittest import mock

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

SINGLE = ["GPipe", "1F1B"]
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
V = ["ZBVZeroBubble", "DualPipeV"]
FULL = {("GPipe", 2, 1, 3), ("1F1B", 4, 1, 8), ("Interleaved1F1B", 2, 2, 4), ("LoopedBFS", 2, 2, 2),
        ("InterleavedZeroBubble", 2, 2, 4), ("ZBVZeroBubble", 2, 2, 4), ("DualPipeV", 2, 2, 4)}


def recorded(name, ranks, rank, micro_batches):
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.stage_index, stage.num_stages, stage.group_rank, stage.group_size = rank, ranks, rank, ranks
    stage.is_first, stage.is_last, stage.has_backward = rank == 0, rank == ranks - 1, True
    actions = []
    for direction in ("fwd", "bwd"):
        for what in ("send", "recv"):
            getattr(stage, f"get_{direction}_{what}_ops").return_value = []
    stage.forward_one_chunk.side_effect = lambda mb, *a, **k: actions.append(
        schedules._Action(rank, schedules.FORWARD, mb))
    stage.backward_one_chunk.side_effect = lambda mb, *a, **k: actions.append(
        schedules._Action(rank, schedules.FULL_BACKWARD, mb))
    schedule = schedules.get_schedule_class(name)(stage, micro_batches)
    schedule._initialize_stage = lambda *a, **k: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return actions


def passes(name, ranks, per_rank, micro_batches):
    if name in SINGLE:
        return {rank: recorded(name, ranks, rank, micro_batches) for rank in range(ranks)}
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * per_rank, None
    order = schedules.get_schedule_class(name)([stage] * per_rank, micro_batches).pipeline_order
    return {rank: [a for a in order[rank] if a is not None] for rank in range(ranks)}


def csv(order):
    return "".join(",".join(map(str, order[rank])) + "\n" for rank in sorted(order))


def fnv(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def golden(name, ranks, per_rank, micro_batches):
    head = f"{name} {ranks} {per_rank} {micro_batches}"
    try:
        order = passes(name, ranks, per_rank, micro_batches)
    except ValueError:
        return f"{head} refused - -\n", ""
    stages = ranks * per_rank
    home = schedules._validate_schedule(order, ranks, stages, micro_batches)
    with_transfers = schedules._add_send_recv({r: list(a) for r, a in order.items()}, home.__getitem__, stages)
    everything = "-"
    if stages <= 8:
        lowered = {r: schedules._add_reduce_grad(schedules._add_unshard_reshard(a), micro_batches)
                   for r, a in order.items()}
        everything = fnv(csv(schedules._add_send_recv(lowered, home.__getitem__, stages)))
    full = f"full {head}\n{csv(order)}" if (name, ranks, per_rank, micro_batches) in FULL else ""
    return f"{head} {fnv(csv(order))} {fnv(csv(with_transfers))} {everything}\n", full


lines, full = [f"# torch {torch.__version__.split('+')[0]}, scripts/make_schedule_golden.py\n"], []
for name in SINGLE + MULTI + V:
    for ranks in (1, 2, 3, 4, 8):
        for per_rank in ((1,) if name in SINGLE else (2,) if name in V else (1, 2, 3)):
            sizes = {1, 2, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks, 4 * ranks + 2}
            for micro_batches in sorted(sizes):
                line, text = golden(name, ranks, per_rank, micro_batches)
                lines.append(line)
                full.append(text)
path = pathlib.Path(__file__).resolve().parent.parent / "phalanx/schedule/testdata/schedule_golden.txt"
path.parent.mkdir(exist_ok=True)
path.write_text("".join(lines + full))
print(f"wrote {path}: {len(lines) - 1} sizes")
