#!/usr/bin/env python3
"""PyTorch's distributed checkpoint between the worker and PyTorch, bit for bit.

    dcp.py EXAMPLES WORK     everything: EXAMPLES holds dcp_interop, WORK is an empty directory
    dcp.py fixture DIR       only writes what tests/fixtures/torch_dcp holds

The numbers are those of examples/dcp_interop.rs.
"""

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import warnings
import zipfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

warnings.filterwarnings("ignore", message="torch.distributed is disabled")

WORLDS = (1, 3, 4)

# Ranks are forked from a process that has imported torch and has no threads yet.
multiprocessing.set_forkserver_preload(["torch", "torch.distributed.checkpoint", "torch.distributed.tensor"])

# What dcp_interop writes, in its order.
OURS = {
    "model.embed_tokens.weight": (50, 12),
    "model.layers.0.input_layernorm.weight": (12,),
    "model.layers.0.self_attn.q_proj.weight": (24, 12),
    "model.layers.0.odd": (3, 5, 7),
    "model.layers.0.mlp.up_proj.weight": (1000, 301),
    "model.norm.weight": (12,),
    "optimizer.state.model.norm.weight.exp_avg": (12,),
    "scale": (),
    "pair": (2,),
}
TRAIN_STATE = {"step": 1234, "lr": [1e-3, -0.5], "name": 'é"\n', "big": 2**64 - 1, "none": None, "on": True}


def bits(k, shape):
    """Number i of tensor k, as a 32-bit pattern."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return ((i * 2654435761 + k * 97) % 2**32).to(torch.uint32).view(torch.int32).reshape(shape)


def small(k, shape, dtype):
    """Number i of tensor k, exact in every type."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return ((i * 7 + k) % 64 - 32).to(dtype).reshape(shape)


def same(got, k, name):
    wanted = bits(k, tuple(got.shape))
    assert torch.equal(got.contiguous().view(torch.int32), wanted), f"{name}: other numbers than were written"


def in_group(rank, function, world, port, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    function(init_device_mesh("cpu", (world,)), *arguments)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def group(world, function, *arguments):
    """Runs function(mesh, ...) as so many ranks."""
    mp.start_processes(in_group, (function, world, free_port(), arguments), nprocs=world, start_method="forkserver")


def load_sharded(mesh, path):
    state = {name: distribute_tensor(torch.zeros(shape), mesh, [Shard(0) if shape else Replicate()]) for name, shape in OURS.items()}
    dcp.load(state, checkpoint_id=path)
    for k, name in enumerate(OURS):
        same(state[name].full_tensor(), k, name)


def load_plain(path):
    state = {name: torch.zeros(shape) for name, shape in OURS.items()}
    state |= {"train_state": None, "optimizer.step": 0}
    dcp.load(state, checkpoint_id=path)
    for k, name in enumerate(OURS):
        same(state[name], k, name)
    assert state["train_state"] == TRAIN_STATE, state["train_state"]
    assert state["optimizer.step"] == 7


def convert(path, work):
    """To one file of torch.save, as people do."""
    file = os.path.join(work, "converted.pt")
    dcp_to_torch_save(path, file)
    state = torch.load(file, weights_only=True)
    moments = state.pop("optimizer")
    assert moments["step"] == 7 and state.pop("train_state") == TRAIN_STATE
    state["optimizer.state.model.norm.weight.exp_avg"] = moments["state"]["model.norm.weight"]["exp_avg"]
    assert state.keys() == OURS.keys(), state.keys()
    for k, name in enumerate(OURS):
        same(state[name], k, name)


def zips(path):
    """Python's zipfile finds each item whole."""
    with open(os.path.join(path, ".metadata"), "rb") as file:
        metadata = pickle.load(file)
    for info in metadata.storage_data.values():
        with open(os.path.join(path, info.relative_path), "rb") as file, tempfile.TemporaryFile() as item:
            file.seek(info.offset)
            item.write(file.read(info.length))
            assert zipfile.ZipFile(item).testzip() is None


def write(mesh, path):
    """A checkpoint of PyTorch's own; the names say how tensors lie, for dcp_interop check."""
    shard = lambda tensor, dimension: distribute_tensor(tensor, mesh, [Shard(dimension)])
    state = {
        "model": {
            "rows": shard(small(0, (7, 5), torch.float32), 0),
            "columns": shard(small(1, (4, 6), torch.float32), 1),
            "bf16": shard(small(2, (9, 4), torch.bfloat16), 0),
            "f16": shard(small(3, (5,), torch.float16), 0),
            "f64": small(4, (3, 2, 2), torch.float64),
            "i64": small(5, (6,), torch.int64),
            "i32": small(6, (6,), torch.int32),
            "i16": small(7, (6,), torch.int16),
            "i8": small(8, (6,), torch.int8),
            "one": shard(small(9, (1,), torch.float32), 0),
            "scalar": small(10, (), torch.float32),
            # Lies in memory column by column, and so on disk.
            "turned": small(11, (6, 4), torch.float32).t().contiguous().t(),
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {"state": {"rows": {"step": torch.tensor(5.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95)}]},
        "step": torch.tensor(2**40 + 1),
        "train_state": {"step": 7, "text": "é", "list": [1, -2.5, None, True], "big": 2**63},
    }
    dcp.save(state, checkpoint_id=path)


def main():
    examples, work = sys.argv[1:]
    ours = lambda *arguments: subprocess.run([os.path.join(examples, "dcp_interop"), *map(str, arguments)], check=True)
    for world in WORLDS:
        path = os.path.join(work, f"ours-{world}")
        ours("write", path, world)
        load_plain(path)
        for loaded in WORLDS:
            group(loaded, load_sharded, path)
        convert(path, work)
        zips(path)
    print(f"torch {torch.__version__} loads the worker's checkpoints of {WORLDS} ranks as {WORLDS} ranks, bit for bit")
    for world in (1, 2, 3):
        path = os.path.join(work, f"torch-{world}")
        group(world, write, path)
        for loaded in WORLDS:
            ours("check", path, loaded)
    print(f"the worker loads torch's checkpoints of (1, 2, 3) ranks as {WORLDS} ranks")


if __name__ == "__main__":
    if sys.argv[1] == "fixture":
        group(2, write, sys.argv[2])
    else:
        main()
