#!/usr/bin/env python3
"""Writes phalanx/optim/testdata/muon_golden.json: what torch.optim.Muon does with given gradients.

    .venv/bin/python scripts/make_muon_golden.py
"""
import json
import math
import pathlib

import torch

SHAPES = {"wide": (4, 10), "tall": (10, 4), "square": (6, 6)}
STEPS = 4


def values(shape, phase):
    """The full rank of a matrix of sines needs more than one frequency."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return (torch.sin(i * 0.7 + phase) + torch.sin(i * i * 0.31 + phase)).to(torch.float32).reshape(shape)


START = {n: values(s, i * 1.3) for i, (n, s) in enumerate(SHAPES.items())}
GRADIENTS = [{n: values(s, i * 0.9 + step * 2.1) * 10.0 ** (-step / 2) for i, (n, s) in enumerate(SHAPES.items())}
             for step in range(STEPS)]


def run(**options):
    parameters = {n: torch.nn.Parameter(v.clone()) for n, v in START.items()}
    optimizer = torch.optim.Muon(list(parameters.values()), **options)
    for step, gradients in enumerate(GRADIENTS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        for name, p in parameters.items():
            p.grad = gradients[name].clone()
        optimizer.step()
    return {n: p.detach().flatten().tolist() for n, p in parameters.items()}


golden = {
    "torch": torch.__version__.split("+")[0],
    "shapes": SHAPES,
    "start": {n: v.flatten().tolist() for n, v in START.items()},
    "gradients": [{n: g.flatten().tolist() for n, g in one.items()} for one in GRADIENTS],
    "learning_rates": [0.1 / (1 + step) for step in range(STEPS)],
    "default": run(),
    "match_rms_adamw": run(adjust_lr_fn="match_rms_adamw", weight_decay=0.5),
    "plain_momentum": run(nesterov=False, momentum=0.6, weight_decay=0.0),
    "little_momentum": run(momentum=0.3),
    "coefficients": run(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3),
    "eps": run(eps=20.0, weight_decay=0.0),
}
path = pathlib.Path(__file__).resolve().parent.parent / "phalanx/optim/testdata/muon_golden.json"
path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
print(f"wrote {path}")
