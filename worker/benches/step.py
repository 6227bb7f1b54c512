"""The same training step in PyTorch, for benches/step.rs: one step for each line on
standard input, its seconds as a line on standard output. The model is written with
PyTorch's fastest operations; each block is recomputed in the backward pass, as ours is.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

shape = json.loads(sys.argv[1])
torch.set_num_threads(shape["threads"])
batch, seq, hidden, heads = shape["batch"], shape["seq"], shape["hidden"], shape["heads"]
kv_heads, inner, vocab, eps = shape["kv_heads"], shape["intermediate"], shape["vocab"], 1e-6
width = hidden // heads


def matrix(rows, columns):
    return torch.nn.Parameter(torch.randn(rows, columns) * 0.02)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        if hasattr(F, "rms_norm"):
            return F.rms_norm(x, (hidden,), self.weight, eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weight


def attend(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-1, -2)) * width**-0.5
    return scores.masked_fill(HIDDEN, float("-inf")).softmax(-1) @ v


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Norm(), Norm()
        self.q, self.o = matrix(heads * width, hidden), matrix(hidden, heads * width)
        self.k, self.v = matrix(kv_heads * width, hidden), matrix(kv_heads * width, hidden)
        self.gate, self.up, self.down = matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)

    def forward(self, x):
        normed = self.first(x)
        split = lambda weight, n: F.linear(normed, weight).view(batch, seq, n, width).transpose(1, 2)
        q, k, v = turn(split(self.q, heads)), turn(split(self.k, kv_heads)), split(self.v, kv_heads)
        k, v = (y.repeat_interleave(heads // kv_heads, 1) if heads != kv_heads else y for y in (k, v))
        x = x + F.linear(attend(q, k, v).transpose(1, 2).reshape(batch, seq, heads * width), self.o)
        normed = self.second(x)
        return x + F.linear(F.silu(F.linear(normed, self.gate)) * F.linear(normed, self.up), self.down)


def turn(x):
    first, second = x.chunk(2, -1)
    return x * COS + torch.cat((-second, first), -1) * SIN


angles = torch.outer(torch.arange(seq), 10000.0 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
COS, SIN, HIDDEN = angles.cos(), angles.sin(), torch.ones(seq, seq, dtype=torch.bool).triu(1)
embedding, output, norm = matrix(vocab, hidden), matrix(vocab, hidden), Norm()
blocks = torch.nn.ModuleList(Block() for _ in range(shape["layers"]))
parameters = [embedding, output, *norm.parameters(), *blocks.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)
tokens = torch.randint(vocab, (batch, seq + 1))

for _ in sys.stdin:
    start = time.perf_counter()
    optimizer.zero_grad()
    x = F.embedding(tokens[:, :-1], embedding)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    logits = F.linear(norm(x), output)
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    print(time.perf_counter() - start, torch.__version__, flush=True)
