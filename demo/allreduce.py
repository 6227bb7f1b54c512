"""Four ranks add up their numbers over gloo, with nothing but the environment."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://")
rank, world = dist.get_rank(), dist.get_world_size()

number = torch.tensor([10.0**rank])
dist.all_reduce(number)
expected = sum(10.0**other for other in range(world))

place = f"local rank {os.environ['LOCAL_RANK']} on {os.environ['SLURMD_NODENAME']}"
print(f"rank {rank} of {world} ({place}): sum {number.item():.0f}, expected {expected:.0f}", flush=True)
if number.item() != expected:
    raise SystemExit(1)
dist.destroy_process_group()
