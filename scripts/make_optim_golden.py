#!/usr/bin/env python3
"""Writes phalanx/optim/testdata/optim_golden.json: what torch.optim and clip_grad_norm_ do with given gradients.

    .venv/bin/python scripts/make_optim_golden.py
"""
import json
import math
import pathlib

import torch

SHAPES = {"weight": (3, 4), "bias": (5,), "deep.scale": (2, 2, 2)}
STEPS = 6


def values(shape, phase):
    count = math.prod(shape)
    return torch.sin(torch.arange(count, dtype=torch.float64) * 0.7 + phase).to(torch.float32).reshape(shape)


def start():
    return {n: values(s, i * 1.3) for i, (n, s) in enumerate(SHAPES.items())}


def gradient(name, step):
    phase = list(SHAPES).index(name) * 0.9 + step * 2.1
    return values(SHAPES[name], phase) * 10.0 ** (-step / 2)


def run(make, rate=0.01):
    parameters = {n: torch.nn.Parameter(v) for n, v in start().items()}
    optimizer = make(list(parameters.values()))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate / (1 + step) * group.get("factor", 1)
        for name, p in parameters.items():
            p.grad = gradient(name, step)
        optimizer.step()
    result = {n: p.detach().flatten().tolist() for n, p in parameters.items()}
    return {"parameters": result, "learning_rates": [rate / (1 + s) for s in range(STEPS)]}


def clip(max_norm):
    parameters = {n: torch.nn.Parameter(v) for n, v in start().items()}
    for name, p in parameters.items():
        p.grad = gradient(name, 0) * 3
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm)
    return {"max_norm": max_norm, "norm": norm.item(),
            "gradients": {n: p.grad.flatten().tolist() for n, p in parameters.items()}}


def groups(parameters):
    """Three parameters: one with a rate of its own, one without decay, one as the optimizer says."""
    weight, bias, scale = parameters
    return [{"params": [weight], "factor": 4, "weight_decay": 0.3}, {"params": [bias], "weight_decay": 0.0},
            {"params": [scale]}]


golden = {
    "torch": torch.__version__.split("+")[0],
    "shapes": SHAPES,
    "start": {n: v.flatten().tolist() for n, v in start().items()},
    "gradients": [{n: gradient(n, s).flatten().tolist() for n in SHAPES} for s in range(STEPS)],
    "adamw": run(lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)),
    "adamw_no_decay": run(lambda p: torch.optim.AdamW(p, betas=(0.8, 0.999), eps=1e-6, weight_decay=0.0)),
    "adamw_groups": run(lambda p: torch.optim.AdamW(groups(p), betas=(0.9, 0.95), weight_decay=0.1)),
    "sgd_groups": run(lambda p: torch.optim.SGD(groups(p), momentum=0.9, weight_decay=0.1)),
    "sgd": run(lambda p: torch.optim.SGD(p)),
    "sgd_momentum": run(lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.05)),
    "sgd_nesterov": run(lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True)),
    "adadelta": run(lambda p: torch.optim.Adadelta(p), rate=1.0),
    "adadelta_decay": run(lambda p: torch.optim.Adadelta(p, rho=0.8, eps=1e-5, weight_decay=0.05), rate=1.0),
    "clip": [clip(1.0), clip(1e4)],
}
path = pathlib.Path(__file__).resolve().parent.parent / "phalanx/optim/testdata/optim_golden.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
print(f"wrote {path}")
