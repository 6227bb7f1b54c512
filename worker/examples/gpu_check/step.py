"""The same training step in PyTorch, for worker/gpu-check.sh: a Qwen3 from nothing, bf16
parameters with f32 masters, AdamW fused, each block computed again in the backward pass as
the worker's is, the loss in chunks. Transformers' model where that is there, else the
same one written with PyTorch's fastest operations. One line of JSON on standard output.

    step.py DEVICE VOCAB SHAPE SEQ BATCH      SHAPE: lines "key = number" of a config.json
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

device, vocab, seq, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
shape = {key.strip(): int(value) for key, value in (line.split("=") for line in sys.argv[3].splitlines())}
cuda = device == "cuda"
dtype = torch.bfloat16 if cuda else torch.float32
CHUNK, WARM, STEPS = 4096, 4, 12
# Enough where a GPU is slow: what was done counts.
DEADLINE = time.perf_counter() + 80


class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Block(torch.nn.Module):
    def __init__(self, hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, **_):
        super().__init__()
        linear = lambda inner, out: torch.nn.Linear(inner, out, bias=False)
        self.heads, self.kv_heads, self.width = num_attention_heads, num_key_value_heads, head_dim
        self.first, self.second = Norm(hidden_size), Norm(hidden_size)
        self.q, self.o = linear(hidden_size, self.heads * head_dim), linear(self.heads * head_dim, hidden_size)
        self.k, self.v = (linear(hidden_size, self.kv_heads * head_dim) for _ in range(2))
        self.q_norm, self.k_norm = Norm(head_dim), Norm(head_dim)
        self.gate, self.up = (linear(hidden_size, intermediate_size) for _ in range(2))
        self.down = linear(intermediate_size, hidden_size)

    def forward(self, x, cos, sin):
        normed = self.first(x)
        split = lambda y, heads: y.view(batch, seq, heads, self.width)
        turn = lambda y: y * cos + torch.cat((-y[..., self.width // 2 :], y[..., : self.width // 2]), -1) * sin
        q = turn(self.q_norm(split(self.q(normed), self.heads)).transpose(1, 2))
        k = turn(self.k_norm(split(self.k(normed), self.kv_heads)).transpose(1, 2))
        v = split(self.v(normed), self.kv_heads).transpose(1, 2)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).reshape(batch, seq, -1))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, shape["hidden_size"])
        self.blocks = torch.nn.ModuleList(Block(**shape) for _ in range(shape["num_hidden_layers"]))
        self.norm = Norm(shape["hidden_size"])
        self.apply(lambda part: isinstance(part, (torch.nn.Linear, torch.nn.Embedding)) and part.weight.data.normal_(0, 0.02))
        width = shape["head_dim"]
        angles = torch.outer(torch.arange(seq), 1e6 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
        return self.norm(x), self.embedding.weight


class Transformers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=vocab, tie_word_embeddings=True, max_position_embeddings=40960, use_cache=False,
            attn_implementation="sdpa", **shape,
        )
        self.model = Qwen3ForCausalLM(config)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()

    def forward(self, tokens):
        return self.model.model(input_ids=tokens).last_hidden_state, self.model.lm_head.weight


torch.manual_seed(0)
try:
    import transformers

    model, name = Transformers(), f"transformers {transformers.__version__}"
except ImportError as error:
    model, name = Plain(), f"a plain model ({error})"
model = model.to(device=device, dtype=dtype)
params = [param for param in model.parameters() if param.requires_grad]
masters = [param.detach().float().clone() for param in params]
optimizer = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
tokens = torch.randint(vocab, (batch, seq + 1), device=device)
inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)


def part(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


def step():
    x, weight = model(inputs)
    chunks = zip(x.flatten(0, 1).split(CHUNK), targets.split(CHUNK))
    loss = sum(checkpoint(part, x, weight, ids, use_reentrant=False) for x, ids in chunks) / targets.numel()
    loss.backward()
    for param, master in zip(params, masters):
        master.grad = param.grad.float()
        param.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        torch._foreach_copy_(params, masters)
    return loss.item()


times = []
for _ in range(WARM + STEPS):
    start = time.perf_counter()
    loss = step()
    times.append(time.perf_counter() - start)
    if time.perf_counter() + times[-1] > DEADLINE:
        break
times = sorted(times[WARM:] or times[1:])
seconds = times[len(times) // 2]
print(
    json.dumps(
        {
            "tokens_per_s": batch * seq / seconds,
            "step_s": seconds,
            "steps": len(times),
            "loss": loss,
            "memory_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
            "torch": torch.__version__,
            "model": name,
        }
    )
)
