#!/usr/bin/env python3
"""Golden numbers for the Llama tests, computed by PyTorch: writes phalanx/models/testdata/llama_golden.json.

    python scripts/make_llama_golden.py            # needs torch; the file is in the repository already

The model is small enough for its weights to be a formula (see `weight`), so that the file holds results only: logits,
loss, the gradient's norm and first elements per parameter, and the losses of a few AdamW steps.
"""

import argparse
import json
import pathlib
import zlib

import torch
import torch.nn.functional as F

CONFIG = dict(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=40, vocab_size=61, max_seq_len=16,
              rope_theta=10000.0, norm_eps=1e-5)
BATCH, SEQ, STEPS = 3, 11, 5


def weight(name, shape):
    """Element i: ((i * 2654435761 + crc32(name)) mod 2^32 / 2^32 - 0.5) * 0.4, plus 1 for norms."""
    n = 1
    for s in shape:
        n *= s
    i = torch.arange(n, dtype=torch.int64)
    x = ((i * 2654435761 + zlib.crc32(name.encode())) % 2**32).double() / 2**32
    return ((x - 0.5) * 0.4 + (1.0 if "norm" in name else 0.0)).float().view(shape)


def shapes(tied):
    c = CONFIG
    d, kv, f = c["dim"], c["n_kv_heads"] * c["dim"] // c["n_heads"], c["ffn_hidden"]
    out = {"tok_embeddings.weight": (c["vocab_size"], d), "norm.weight": (d,)}
    if not tied:
        out["output.weight"] = (c["vocab_size"], d)
    for n in range(c["n_layers"]):
        p = f"layers.{n}."
        out |= {p + "attention.wq.weight": (d, d), p + "attention.wk.weight": (kv, d),
                p + "attention.wv.weight": (kv, d), p + "attention.wo.weight": (d, d),
                p + "feed_forward.w1.weight": (f, d), p + "feed_forward.w2.weight": (d, f),
                p + "feed_forward.w3.weight": (f, d),
                p + "attention_norm.weight": (d,), p + "ffn_norm.weight": (d,)}
    return out


def tokens(offset):
    i = torch.arange(BATCH * SEQ)
    return ((i * i * 7 + i * 3 + offset) % CONFIG["vocab_size"]).view(BATCH, SEQ)


def rms_norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), None, CONFIG["norm_eps"]) * w


def rotate(x):
    hd, n = x.shape[-1], x.shape[-2]
    freqs = 1.0 / CONFIG["rope_theta"] ** (torch.arange(0, hd, 2, dtype=torch.float32) / hd)
    angles = torch.outer(torch.arange(n, dtype=torch.float32), freqs)
    angles = torch.cat((angles, angles), -1)
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()


def forward(p, ids):
    c = CONFIG
    hd = c["dim"] // c["n_heads"]
    x = F.embedding(ids, p["tok_embeddings.weight"])
    for n in range(c["n_layers"]):
        w = lambda name: p[f"layers.{n}.{name}.weight"]
        h = rms_norm(x, w("attention_norm"))
        q, k, v = (F.linear(h, w(f"attention.{m}")).view(BATCH, SEQ, -1, hd).transpose(1, 2) for m in ("wq", "wk", "wv"))
        groups = c["n_heads"] // c["n_kv_heads"]
        k, v = rotate(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = rotate(q) @ k.transpose(-1, -2) / hd**0.5
        scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(BATCH, SEQ, -1)
        x = x + F.linear(y, w("attention.wo"))
        h = rms_norm(x, w("ffn_norm"))
        x = x + F.linear(F.silu(F.linear(h, w("feed_forward.w1"))) * F.linear(h, w("feed_forward.w3")),
                         w("feed_forward.w2"))
    return F.linear(rms_norm(x, p["norm.weight"]), p.get("output.weight", p["tok_embeddings.weight"]))


def golden(tied):
    p = {n: weight(n, s).double().requires_grad_() for n, s in shapes(tied).items()}
    logits = forward(p, tokens(0))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens(5).flatten())
    loss.backward()
    result = {
        "loss": loss.item(),
        "logits": [round(x, 7) for x in logits[-1, -1].tolist()],
        "grads": {n: {"norm": t.grad.norm().item(), "first": t.grad.flatten()[:3].tolist()} for n, t in p.items()},
    }
    optimizer = torch.optim.AdamW(p.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(p, tokens(step)).flatten(0, 1), tokens(step + 5).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return result | {"adamw_losses": losses}


def main():
    default = pathlib.Path(__file__).parent.parent / "phalanx/models/testdata/llama_golden.json"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=default)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    data = {"config": CONFIG, "batch": BATCH, "seq": SEQ, "untied": golden(False), "tied": golden(True)}
    out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
