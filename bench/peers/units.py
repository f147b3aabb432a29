#!/usr/bin/env python3
"""What a unit costs under Python's FSDP2: the peer of bench/units_bench.cpp.

    python3 bench/peers/units.py --ranks 2
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn

UNITS, WIDTH = 64, 16
REPEATS, STEPS = 5, 10


def make(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def run(rank, size, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    data = torch.randn(8, WIDTH)

    def measure(model, optimizer):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / STEPS * 1e6

    sharded, plain = make(True), make(False)
    overheads = []
    for repeat in range(REPEATS + 1):  # the sides take turns; the first warms up
        ours, limit = measure(*sharded), measure(*plain)
        if repeat > 0:
            overheads.append((ours - limit) / UNITS)
    if rank == 0:
        results.put(statistics.median(overheads))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args.ranks, os.path.join(folder, "meet"), results), nprocs=args.ranks)
    name = f"units/linear16x64/world{args.ranks}"
    print(json.dumps({"name": name, "peers": {"fsdp2": round(results.get(), 1)}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
