"""Times torch's gloo as one rank, as worker/benches/collectives.rs times ours: the median over
the rounds of what the slowest rank took, after a barrier.

    collectives.py RANK WORLD PORT       rank 0 prints "operation bytes nanoseconds"

torch 1.13's gloo has no reduce_scatter; newer ones' is an all_reduce of which each rank keeps
its part, which is what is timed here. Exit code 77: no torch.
"""

import os
import sys
import time

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    print(f"collectives: skipped: {error}", file=sys.stderr)
    sys.exit(77)

SIZES = [int(size) for size in os.environ["SIZES"].split()]


def timed(rounds, work):
    took = []
    for _ in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - began)
    # The first one warms up.
    slowest = torch.tensor(took[1:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return int(slowest.sort().values[rounds // 2])


def main():
    rank, world, port = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for size in SIZES:
        rounds = min(max((64 << 20) // size, 5), 200)
        values = torch.ones(size // 4)
        part = torch.ones(size // 4 // world)
        parts = list(values[: part.numel() * world].chunk(world))

        def reduce_scatter():
            dist.all_reduce(values)
            part.copy_(parts[rank])

        times = {
            "all_reduce": timed(rounds, lambda: dist.all_reduce(values)),
            "all_gather": timed(rounds, lambda: dist.all_gather(parts, part)),
            "reduce_scatter": timed(rounds, reduce_scatter),
        }
        if rank == 0:
            for name, took in times.items():
                print(name, size, took, flush=True)
    dist.barrier()


main()
