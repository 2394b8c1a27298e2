"""Trains a Mixtral in plain PyTorch on one rank, or with its experts dealt out over gloo ranks.

    python mixture.py --save-init DIR --save-tokens FILE --steps 10
    torchrun --nproc-per-node 2 mixture.py --init-from DIR --tokens FILE

Needs torch, numpy and safetensors. Every rank takes its share of the rows of a step. Rank r of n has experts
r E/n ... (r + 1) E/n - 1. Rows go to the ranks of their experts and back by an exact all-to-all. The gradients of all
other weights are summed in one all-reduce. The loss is the mean over the tokens of the global batch, the step AdamW
(betas 0.9 and 0.95, decay 0.1 on every parameter) after clipping to norm 1. Weights are a folder as Hugging Face
transformers writes it; tokens are uint16 without a header. Prints one line of JSON: losses, tokens/s, CPU time a step.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

SKIP = 3  # steps that warm up


class AllToAll(torch.autograd.Function):
    """Rows to their ranks; the gradient goes the other way."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.sizes = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, gradient):
        send, receive = ctx.sizes
        out = gradient.new_empty(sum(send), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), send, receive)
        return out, None, None


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    def __init__(self, cfg, rank, world):
        super().__init__()
        self.top_k, self.world = cfg.top_k, world
        self.local = cfg.experts // world
        self.gate = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.experts = nn.ModuleDict(
            {str(e): Expert(cfg.dim, cfg.hidden) for e in range(rank * self.local, (rank + 1) * self.local)})

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, 1)
        weights, chosen = F.softmax(self.gate(x), dim=-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=self.local * self.world)
        rows = self.compute(x[token], counts)
        return torch.zeros_like(x).index_add(0, token, rows * weights.flatten()[order, None]).view(shape)

    def compute(self, rows, counts):
        """The experts' results of rows in the order of their experts."""
        if self.world == 1:
            return self.each_expert(rows, counts.tolist())
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        arriving = arriving.view(self.world, self.local)
        send, receive = counts.view(self.world, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = AllToAll.apply(rows, send, receive)
        # Rows come by rank, then by expert; the experts want theirs together.
        expert = torch.arange(self.local).repeat(self.world).repeat_interleave(arriving.flatten())
        order = expert.argsort(stable=True)
        done = self.each_expert(rows[order], arriving.sum(0).tolist())
        return AllToAll.apply(torch.empty_like(done).index_copy(0, order, done), receive, send)

    def each_expert(self, rows, counts):
        return torch.cat([expert(part) for expert, part in zip(self.experts.values(), rows.split(counts))])


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.dim // cfg.heads
        self.q_proj = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.k_proj = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))

        def rotated(t):
            first, second = t.chunk(2, dim=-1)
            return t * cos + torch.cat((-second, first), dim=-1) * sin

        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, cfg, rank, world):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(cfg.dim), RMSNorm(cfg.dim)
        self.self_attn = Attention(cfg)
        self.block_sparse_moe = Mixture(cfg, rank, world)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, cfg, rank, world):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg, rank, world) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.dim)


class Mixtral(nn.Module):
    def __init__(self, cfg, rank, world):
        super().__init__()
        self.model = Backbone(cfg, rank, world)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)
        head_dim = cfg.dim // cfg.heads
        frequencies = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(cfg.seq), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.model.norm(x))


def save_init(cfg, folder):
    torch.manual_seed(1)
    model = Mixtral(cfg, 0, 1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
        "hidden_size": cfg.dim, "intermediate_size": cfg.hidden, "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads, "num_key_value_heads": cfg.kv_heads, "num_local_experts": cfg.experts,
        "num_experts_per_tok": cfg.top_k, "vocab_size": cfg.vocab, "max_position_embeddings": cfg.seq,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "float32"}))


def train(cfg, rank, world):
    model = Mixtral(cfg, rank, world)
    weights = load_file(cfg.init_from / "model.safetensors")
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    tokens = torch.from_numpy(numpy.fromfile(cfg.tokens, dtype=numpy.uint16).astype(numpy.int64))
    own = [p for n, p in model.named_parameters() if ".experts." in n]
    shared = [p for n, p in model.named_parameters() if ".experts." not in n]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = cfg.batch // world
    losses, seconds, cpu = [], [], []
    for step in range(cfg.steps):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        first = step * cfg.batch + rank * rows
        sample = torch.stack([tokens[k * cfg.seq:(k + 1) * cfg.seq + 1] for k in range(first, first + rows)])
        logits = model(sample[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), sample[:, 1:].flatten(), reduction="sum") / (cfg.batch * cfg.seq)
        loss.backward()
        for parameter in model.parameters():  # an expert without a row
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        loss = loss.detach()
        if world > 1:
            flat = torch.cat([p.grad.flatten() for p in shared] + [loss.view(1)])
            dist.all_reduce(flat)
            for parameter, part in zip(shared, flat.split([p.numel() for p in shared] + [1])):
                parameter.grad.copy_(part.view_as(parameter))
            loss = flat[-1]
        squares = torch.stack(torch._foreach_norm([p.grad for p in own])).square().sum()
        if world > 1:
            dist.all_reduce(squares)
        norm = (squares + torch.stack(torch._foreach_norm([p.grad for p in shared])).square().sum()).sqrt()
        torch._foreach_mul_([p.grad for p in model.parameters()], float((1.0 / (norm + 1e-6)).clamp(max=1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
    ranks = [None] * world
    here = statistics.median(cpu[SKIP:]) * 1e3
    if world > 1:
        dist.all_gather_object(ranks, here)
    else:
        ranks = [here]
    if rank == 0:
        print(json.dumps({"losses": losses, "cpu_ms_per_step": ranks,
                          "tokens_per_s": cfg.batch * cfg.seq / statistics.median(seconds[SKIP:])}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 512, "experts": 8, "top_k": 2,
                        "vocab": 4096, "seq": 256, "batch": 8, "steps": 10}.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    for name in ("init-from", "tokens", "save-init", "save-tokens"):
        parser.add_argument("--" + name, type=pathlib.Path)
    cfg = parser.parse_args()
    if cfg.save_init and cfg.save_tokens:
        save_init(cfg, cfg.save_init)
        count = cfg.steps * cfg.batch * cfg.seq + 1
        tokens = numpy.minimum(numpy.random.default_rng(1).zipf(1.3, count), cfg.vocab) - 1
        tokens.astype(numpy.uint16).tofile(cfg.save_tokens)
        return
    if not (cfg.init_from and cfg.tokens):
        parser.error("expected --init-from and --tokens, or --save-init and --save-tokens")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if cfg.experts % world or cfg.batch % world:
        parser.error(f"{cfg.experts} experts and a batch of {cfg.batch} cannot be dealt to {world} ranks")
    if world > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    train(cfg, rank, world)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
