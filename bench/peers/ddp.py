#!/usr/bin/env python3
"""What bench/ddp_bench.cpp measures, under PyTorch's own DDP and ZeRO.

    python3 bench/peers/ddp.py --ranks 2

Prints partial rows; bench/run.py puts them beside ours. One thread a rank, Gloo,
AdamW(fused=True), the same model and shapes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from steps import CONFIGS, Gpt

REPEATS, STEPS, WARM_UP = 7, 6, 4
CONSOLIDATIONS = 3


def time_of(body):
    dist.barrier()
    start = time.perf_counter()
    body()
    slowest = torch.tensor([(time.perf_counter() - start) * 1e3])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def make_step(with_zero):
    torch.manual_seed(0)
    config = CONFIGS["tiny"]
    model = DistributedDataParallel(Gpt(*config), gradient_as_bucket_view=True)
    if with_zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config[0], (config[5], config[4]))

    def step():
        F.cross_entropy(model(ids).view(-1, config[0]), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_of(step):
    def run():
        for _ in range(STEPS):
            step()

    return run


def consolidation():
    params = [torch.zeros(520 * 512 if i % 2 == 0 else 512, requires_grad=True) for i in range(150)]
    for param in params:
        param.grad = torch.ones_like(param)
    zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-4)
    zero.step()
    return statistics.median(time_of(zero.consolidate_state_dict) for _ in range(CONSOLIDATIONS))


def run(rank, size, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    sides = [make_step(False), make_step(True)]
    for _ in range(WARM_UP):
        for side in sides:
            side()
    times = [[], []]
    for _ in range(REPEATS):
        for side, own in zip(sides, times):
            own.append(time_of(steps_of(side)) / STEPS)
    ddp, zero = (statistics.median(own) for own in times)
    consolidated = consolidation()
    if rank == 0:
        results.put((ddp, zero, consolidated))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        context = mp.spawn(run, (ranks, rendezvous, results), ranks, join=False)
        times = results.get()
        while not context.join():
            pass
    names = ("ddp/gpt-tiny", "zero/gpt-tiny", "zero/consolidate/20M")
    for name, peer, value in zip(names, ("ddp", "zero", "zero"), times):
        print(json.dumps({"name": f"{name}/cpu{ranks}", "peers": {peer: round(value, 2)}}))


if __name__ == "__main__":
    main()
