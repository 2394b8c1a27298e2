#!/usr/bin/env python3
"""Trains a Llama with PyTorch on one device and says how fast and with how much memory: the peer of `phalanx train`.

    scripts/gpu_day/torch_llama.py --dim 2048 --n-layers 16 --n-heads 32 --n-kv-heads 8 --ffn-hidden 8192 \\
        --vocab 128256 --seq 4096 --batch 2 --steps 30 --skip 10 --precision autocast --compile --recompute selective

Weights have Hugging Face's names. A token file holds uint16 ids (uint32 if vocab > 65536), little-endian, no header.
Sample k is tokens k*seq to k*seq + seq; step s takes samples s*batch onwards; the labels are the inputs shifted by one.
A step is forward, mean cross entropy, backward, clipping to norm 1 and AdamW (fused) with decay on every parameter.

--precision autocast   weights, gradients and moments in fp32, torch.autocast to bf16
            bf16       weights, gradients and moments in bf16
            fp32       everything in fp32; --tf32 lets matrix products run in TF32
--recompute full       a block keeps its input only and is run again in the backward
            selective  torchtitan's policy: a block keeps the results of attention and of every other matrix product

Nothing waits for the device between steps unless --log-every says so. The closing line is JSON. tokens_per_s is over
the wall time of all steps after --skip, with the device idle at both ends; step_ms_p50 is the median step between
events. mfu is a share of the device's dense bf16 peak, whatever the precision, with the operations per token that
Phalanx counts:

    6 (parameters - vocab dim) + 12 n_layers dim seq

that is, without the input embedding, with both halves of the attention matrix and without what --recompute repeats.

--profile N traces N further steps. Their idle time is that between the first and the last kernel of all N steps,
shared out among them.
--self-test checks this program on tiny models. It needs torch, and safetensors for --init-from.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ATTENTION = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
             "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
PRECISIONS = ("autocast", "bf16", "fp32")
RECOMPUTE = ("none", "full", "selective")
# Dense bf16 TFLOP/s of the data sheets, as in gpu_peak_tflops of phalanx/report/log_line.cc: the first row whose parts
# all occur in the device's name counts.
PEAK_TFLOPS = ((("A100",), 312), (("H100", "NVL"), 835), (("H100", "PCIe"), 756), (("H100",), 989), (("H200",), 989))


# ---------------------------------------------------------------- model

@dataclasses.dataclass
class LlamaConfig:
    dim: int = 256
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    ffn_hidden: int = 688
    vocab: int = 4096
    seq: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self):
        return self.dim // self.n_heads

    def validate(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                sys.exit(f"--{field.name.replace('_', '-')} {getattr(self, field.name)}: expected more than 0")
        if self.dim % (2 * self.n_heads):
            sys.exit(f"--dim {self.dim}: expected a multiple of 2 x n_heads = {2 * self.n_heads}")
        if self.n_heads % self.n_kv_heads:
            sys.exit(f"--n-heads {self.n_heads}: expected a multiple of n_kv_heads = {self.n_kv_heads}")


class RMSNorm(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.eps = cfg.norm_eps
        self.weight = nn.Parameter(torch.empty(cfg.dim))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # computes in fp32 in every precision


def rope_tables(cfg, device):
    """cos and sin [seq, head_dim] in fp32; each half repeats the same head_dim / 2 frequencies."""
    freqs = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim)
    angles = torch.outer(torch.arange(cfg.seq, dtype=torch.float32), freqs)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(device), angles.sin().to(device)


def apply_rope(x, cos, sin):
    """x [batch, heads, seq, head_dim] is rotated in fp32 and returned in its own dtype."""
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).type_as(x)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.head_dim
        self.groups = cfg.n_heads // cfg.n_kv_heads
        self.q_proj = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.k_proj = nn.Linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x, cos, sin):
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        grouped = self.groups > 1
        if grouped and q.dtype == torch.float32:  # the one fused fp32 kernel of CUDA takes no grouped heads
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
            grouped = False
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.gate_proj = nn.Linear(cfg.dim, cfg.ffn_hidden, bias=False)
        self.up_proj = nn.Linear(cfg.dim, cfg.ffn_hidden, bias=False)
        self.down_proj = nn.Linear(cfg.ffn_hidden, cfg.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


KEPT_BY_SELECTIVE = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def selective_contexts():
    """Keeps attention and the first, third, ... matrix product of a block."""
    products = collections.Counter()

    def policy(context, op, *args, **kwargs):
        if op not in KEPT_BY_SELECTIVE:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if op == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


class Block(nn.Module):
    def __init__(self, cfg, recompute):
        super().__init__()
        self.recompute = recompute
        self.input_layernorm = RMSNorm(cfg)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg)
        self.mlp = MLP(cfg)

    def layer(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x, cos, sin):
        if self.recompute == "none":
            return self.layer(x, cos, sin)
        if self.recompute == "full":
            return checkpoint(self.layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
        return checkpoint(self.layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False,
                          context_fn=selective_contexts)


class Backbone(nn.Module):
    def __init__(self, cfg, recompute):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg, recompute) for _ in range(cfg.n_layers))
        self.norm = RMSNorm(cfg)

    def forward(self, tokens, cos, sin):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """Token ids [batch, seq] in, logits [batch, seq, vocab] out. Built without storage: see make_model."""

    def __init__(self, cfg, recompute):
        super().__init__()
        self.model = Backbone(cfg, recompute)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        self.rope = None

    def forward(self, tokens):
        return self.lm_head(self.model(tokens, *self.rope))


def flops_per_token(cfg, parameters):
    return 6 * (parameters - cfg.vocab * cfg.dim) + 12 * cfg.n_layers * cfg.dim * cfg.seq


def peak_tflops(device_name):
    return next((peak for parts, peak in PEAK_TFLOPS if all(part in device_name for part in parts)), None)


# ---------------------------------------------------------------- weights and data

def draw_weights(model, device, seed):
    """Norm weights are 1, the others N(0, 0.02), drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.fill_(1.0)
        else:
            p.normal_(0.0, 0.02, generator=generator)


def read_weights(model, path):
    from safetensors import safe_open
    with safe_open(path, framework="pt", device="cpu") as file:
        wanted, found = dict(model.named_parameters()), set(file.keys())
        if found != wanted.keys():
            sys.exit(f"--init-from {path}: the file lacks {sorted(wanted.keys() - found)[:3]} and has "
                     f"{sorted(found - wanted.keys())[:3]} that the model lacks; check the model's flags")
        for name, p in wanted.items():
            value = file.get_tensor(name)
            if value.shape != p.shape:
                sys.exit(f"--init-from {path}: {name} has shape {list(value.shape)}, expected {list(p.shape)}")
            p.copy_(value)


def make_model(args, cfg):
    with torch.device("meta"):
        model = Llama(cfg, args.recompute)
    model.to(torch.bfloat16 if args.precision == "bf16" else torch.float32)
    model.to_empty(device=args.device)
    with torch.no_grad():
        if args.init_from:
            read_weights(model, args.init_from)
        else:
            draw_weights(model, args.device, args.seed)
    model.rope = rope_tables(cfg, args.device)
    return model


def signed(number):
    return number - (1 << 64) if number >= 1 << 63 else number


def synthetic_tokens(count, vocab, seed):
    """Even positions come from splitmix64, skewed towards small ids; an odd one is 7 t + 1 mod vocab of the one before.
    int64 wraps as uint64 does; a mask makes the arithmetic shifts logical."""
    def xor_shifted(z, bits):
        return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))

    z = seed + torch.arange(1, (count + 1) // 2 + 1) * signed(0x9E3779B97F4A7C15)
    z = xor_shifted(z, 30) * signed(0xBF58476D1CE4E5B9)
    z = xor_shifted(z, 27) * signed(0x94D049BB133111EB)
    z = xor_shifted(z, 31)
    even = ((z & 0xFFFFFFFF) % vocab) * ((z >> 32 & 0xFFFFFFFF) % vocab) // vocab
    return torch.stack((even, (even * 7 + 1) % vocab), dim=1).flatten()[:count]


def read_tokens(path, cfg):
    dtype = torch.uint16 if cfg.vocab <= 65536 else torch.uint32
    tokens = torch.from_file(path, shared=False, size=os.path.getsize(path) // dtype.itemsize, dtype=dtype)
    if len(tokens) <= cfg.seq:
        sys.exit(f"--tokens {path}: {len(tokens)} tokens, expected at least seq + 1 = {cfg.seq + 1}")
    return tokens


class Batches:
    """Batch of a step on the device: inputs and labels [batch, seq]. Starts over after the last whole sample."""

    def __init__(self, args, cfg):
        steps = args.steps + (args.profile + 1 if args.profile else 0)
        self.tokens = (read_tokens(args.tokens, cfg) if args.tokens
                       else synthetic_tokens(steps * args.batch * cfg.seq + 1, cfg.vocab, args.seed))
        self.args, self.cfg = args, cfg
        self.samples = (len(self.tokens) - 1) // cfg.seq

    def __call__(self, step):
        seq = self.cfg.seq
        begins = [(step * self.args.batch + i) % self.samples * seq for i in range(self.args.batch)]
        block = torch.stack([self.tokens[b:b + seq + 1].to(torch.int64) for b in begins])
        if block.max() >= self.cfg.vocab:
            sys.exit(f"step {step}: token id {block.max()}, expected less than --vocab {self.cfg.vocab}")
        if self.args.device.type == "cuda":
            block = block.pin_memory().to(self.args.device, non_blocking=True)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()


# ---------------------------------------------------------------- training

def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


class Trainer:
    def __init__(self, args, cfg):
        self.args, self.model, self.loss = args, make_model(args, cfg), cross_entropy
        self.parameters = list(self.model.parameters())
        if args.compile:
            for block in self.model.model.layers:
                block.compile()
            self.loss = torch.compile(cross_entropy)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps,
                                           weight_decay=args.weight_decay, fused=True)
        self.batches = Batches(args, cfg)

    def step(self, number):
        """Loss and norm of the gradients, as tensors on the device."""
        inputs, labels = self.batches(number)
        with torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.args.precision == "autocast"):
            loss = self.loss(self.model(inputs), labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.args.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm


class Clock:
    """Times of marks in milliseconds: events on a CUDA device, the wall clock elsewhere."""

    def __init__(self, device):
        self.on_gpu, self.marks = device.type == "cuda", []

    def mark(self):
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def steps_ms(self):
        pairs = zip(self.marks, self.marks[1:])
        return [a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a) for a, b in pairs]


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def log_line(step, loss, norm):
    print(f"step: {step + 1}  loss: {loss.item():.6f}  grad_norm: {norm.item():.4f}", flush=True)


def train(args, trainer):
    """Runs --steps steps. Returns losses, gradient norms, and seconds and milliseconds of the timed steps."""
    results, clock = [], Clock(args.device)
    for step in range(args.steps):
        if step == args.skip:
            gc.collect()
            gc.freeze()  # a collection between steps does not look at the model
            synchronise(args.device)
            begin = time.perf_counter()
            clock.mark()
        results.append(trainer.step(step))
        if step >= args.skip:
            clock.mark()
        if args.log_every and (step + 1) % args.log_every == 0:
            log_line(step, *results[-1])
    synchronise(args.device)
    seconds = time.perf_counter() - begin
    if not args.log_every:
        for step in range(0, args.steps, max(1, args.steps // 10)):
            log_line(step, *results[step])
    losses, norms = (torch.stack(column).tolist() for column in zip(*results))
    return losses, norms, seconds, clock.steps_ms()


def gib(size):
    return round(size / 2**30, 3)


def peak_memory_gib(device):
    if device.type != "cuda":
        return None
    return {"allocated": gib(torch.cuda.max_memory_allocated(device)),
            "reserved": gib(torch.cuda.max_memory_reserved(device))}


def report(args, cfg, trainer, losses, norms, seconds, steps_ms):
    name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "cpu"
    parameters = sum(p.numel() for p in trainer.parameters)
    tokens_per_s = args.batch * cfg.seq * (args.steps - args.skip) / seconds
    tflops, peak = tokens_per_s * flops_per_token(cfg, parameters) / 1e12, peak_tflops(name)
    return {
        "peer": "torch", "torch": torch.__version__, "device": name, "precision": args.precision, "tf32": args.tf32,
        "compile": args.compile, "recompute": args.recompute, "attention": args.attention,
        "parameters": parameters, "model": dataclasses.asdict(cfg), "batch": args.batch, "seq": cfg.seq,
        "steps": args.steps, "skip": args.skip, "tokens_per_s": round(tokens_per_s, 1),
        "step_ms_p50": round(statistics.median(steps_ms), 3), "step_ms_min": round(min(steps_ms), 3),
        "step_ms_max": round(max(steps_ms), 3), "tflops": round(tflops, 3),
        "mfu": round(tflops / peak, 4) if peak else None, "peak_memory_gib": peak_memory_gib(args.device),
        "losses": [round(x, 6) for x in losses], "grad_norms": [round(x, 6) for x in norms],
    }


# ---------------------------------------------------------------- profile

def short_name(kernel):
    """A kernel's name without return type, anonymous namespaces and most of its template arguments."""
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", kernel)
    return name if len(name) <= 90 else name[:60] + "..." + name[-27:]


def summarise_kernels(events, steps, top=10):
    """Figures per step of the GPU's events in a Chrome trace; times in microseconds."""
    spans = [(e["ts"], e["ts"] + e["dur"], e) for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not spans:
        sys.exit("--profile: the trace holds no event of the GPU; may this user read its counters (CUPTI)?")
    spans.sort(key=lambda span: span[:2])
    busy, end = 0.0, -math.inf  # kernels of several streams may overlap
    for first, last, _ in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    calls, totals, categories = collections.Counter(), collections.Counter(), collections.Counter()
    for first, last, event in spans:
        calls[event["name"]] += 1
        totals[event["name"]] += last - first
        categories[event["cat"]] += 1
    return {"steps": steps, "kernels": categories["kernel"] / steps,
            "copies_and_fills": (len(spans) - categories["kernel"]) / steps,
            "busy_us": round(busy / steps, 1), "idle_us": round((end - spans[0][0] - busy) / steps, 1),
            "top": [{"name": short_name(name), "calls": calls[name] / steps, "us": round(total / steps, 1)}
                    for name, total in totals.most_common(top)]}


def profile(args, trainer):
    """Traces the device's activity alone: the operators of the CPU would slow the launches down."""
    from torch.profiler import ProfilerActivity, schedule
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True,
                                schedule=schedule(wait=0, warmup=1, active=args.profile)) as profiler:
        for step in range(args.steps, args.steps + args.profile + 1):
            trainer.step(step)
            if step in (args.steps, args.steps + args.profile):
                synchronise(args.device)
            if step < args.steps + args.profile:
                profiler.step()
    with tempfile.TemporaryDirectory(prefix="torch-llama-") as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            return summarise_kernels(json.load(file)["traceEvents"], args.profile)


def print_profile(figures):
    print(f"profile of {figures['steps']} steps, per step: {figures['kernels']:.1f} kernels, "
          f"{figures['copies_and_fills']:.1f} copies and fills, busy {figures['busy_us'] / 1e3:.3f} ms, "
          f"idle {figures['idle_us'] / 1e3:.3f} ms\n{'us':>10} {'calls':>7}  kernel")
    for row in figures["top"]:
        print(f"{row['us']:10.1f} {row['calls']:7.1f}  {row['name']}")


# ---------------------------------------------------------------- self-test

def check(what, good):
    print(f"{'ok' if good else 'FAILED'}: {what}", flush=True)
    return good


def matrix_flops(args, cfg):
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        Trainer(args, cfg).step(0)
    return counter.get_total_flops()


def largest_gap(a, b):
    return max(abs(x - y) for x, y in zip(a, b))


def self_test(args):
    cfg = LlamaConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_hidden=160, vocab=512, seq=64)
    args = argparse.Namespace(**dict(vars(args), batch=2, steps=6, skip=2, log_every=100, tokens=None, init_from=None,
                                     profile=0))
    good = []

    def losses_of(precision, recompute, compiled=False):
        run = argparse.Namespace(**dict(vars(args), precision=precision, recompute=recompute, compile=compiled))
        if compiled:
            torch.compiler.reset()  # past its limit of variants torch.compile falls back to eager
        return train(run, Trainer(run, cfg))[0]

    reference = losses_of("fp32", "none")
    good.append(check("fp32 learns", reference[0] > reference[-1] and abs(reference[0] - math.log(cfg.vocab)) < 0.1))
    for precision in PRECISIONS:
        plain = losses_of(precision, "none")
        good.append(check(f"{precision} is near fp32", largest_gap(plain, reference) < 0.03))
        for recompute in RECOMPUTE:
            gap = largest_gap(losses_of(precision, recompute), plain)
            good.append(check(f"{precision} with recompute {recompute}: losses within {gap:.1e}",
                              gap < (1e-4 if precision == "fp32" else 1e-3)))
            if args.compile:
                gap = largest_gap(losses_of(precision, recompute, compiled=True), plain)
                good.append(check(f"{precision} with recompute {recompute} compiled: losses within {gap:.1e}",
                                  gap < (1e-4 if precision == "fp32" else 0.02)))
    eager = argparse.Namespace(**dict(vars(args), compile=False, precision="fp32"))
    flops = [matrix_flops(argparse.Namespace(**dict(vars(eager), recompute=r)), cfg)
             for r in ("none", "selective", "full")]
    good.append(check(f"matrix operations grow with what is recomputed: {flops}", flops[0] < flops[1] < flops[2]))

    default = LlamaConfig()
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(default, "none").parameters())
    good.append(check("parameters and operations of the 5M flavor", parameters == 4999424 and flops_per_token(
        default, parameters) == 6 * (4999424 - 4096 * 256) + 12 * 4 * 256 * 256))
    good.append(check("synthetic tokens", synthetic_tokens(5, 4096, 1).tolist() == [2840, 3497, 2704, 2545, 251]
                      and synthetic_tokens(4, 128256, 1).tolist() == [20752, 17009, 37722, 7543]))
    trace = [{"cat": "kernel", "name": "a", "ts": 0, "dur": 10}, {"cat": "kernel", "name": "b", "ts": 5, "dur": 10},
             {"cat": "gpu_memcpy", "name": "c", "ts": 25, "dur": 5}, {"cat": "cuda_runtime", "ts": 0, "dur": 99},
             {"cat": "gpu_user_annotation", "name": "AdamW", "ts": 0, "dur": 99}, {"ph": "M"}]
    figures = summarise_kernels(trace, steps=2)
    good.append(check("busy and idle time of a trace", [figures[k] for k in (
        "kernels", "copies_and_fills", "busy_us", "idle_us")] == [1.0, 0.5, 10.0, 5.0]))
    good.append(check("peaks of devices", [peak_tflops(n) for n in (
        "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "cpu")] == [989, 756, 312, None]))
    return 0 if all(good) else 1


# ---------------------------------------------------------------- main

def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(LlamaConfig):
        p.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    p.add_argument("--batch", type=int, default=8, help="sequences of a step")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--skip", type=int, default=5, help="first steps left out of the timing")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--tokens", help="token file; without it, synthetic tokens")
    p.add_argument("--init-from", help="safetensors file with the initial weights")
    p.add_argument("--precision", choices=PRECISIONS, default="autocast")
    p.add_argument("--tf32", action="store_true", help="fp32 matrix products in TF32")
    p.add_argument("--compile", action="store_true", help="torch.compile of each block and of the loss")
    p.add_argument("--recompute", choices=RECOMPUTE, default="none")
    p.add_argument("--attention", choices=("sdpa", *ATTENTION), default="sdpa", help="sdpa: torch chooses the kernel")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--beta1", type=float, default=0.9)
    p.add_argument("--beta2", type=float, default=0.95)
    p.add_argument("--eps", type=float, default=1e-8)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--log-every", type=int, default=0, help="read the loss every so many steps; 0: after the last")
    p.add_argument("--profile", type=int, default=0, metavar="N", help="trace N further steps (CUDA)")
    p.add_argument("--self-test", action="store_true", help="check this program; with --compile, compiled runs too")
    args = p.parse_args()
    if args.batch < 1 or not 0 <= args.skip < args.steps:
        p.error(f"--batch {args.batch} --skip {args.skip} --steps {args.steps}: expected a batch of at least 1 and "
                "0 <= skip < steps")
    if args.tf32 and args.precision != "fp32":
        p.error(f"--tf32 is for --precision fp32, found {args.precision}")
    if args.profile and args.device.type != "cuda":
        p.error(f"--profile traces a CUDA device, found --device {args.device}")
    return args


def main():
    args = parse_args()
    cfg = LlamaConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(LlamaConfig)})
    cfg.validate()
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device.index or 0)
    chosen = contextlib.nullcontext() if args.attention == "sdpa" else sdpa_kernel(ATTENTION[args.attention])
    with chosen:
        if args.self_test:
            return self_test(args)
        trainer = Trainer(args, cfg)
        result = report(args, cfg, trainer, *train(args, trainer))
        if args.profile:
            result["profile"] = profile(args, trainer)
            print_profile(result["profile"])
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
