#!/usr/bin/env python3
"""What bench/ddp_bench.cpp measures, under PyTorch's own DDP and ZeRO.

    python3 bench/peers/ddp.py --ranks 2
    python3 bench/peers/ddp.py --ranks 1 --config 124M --device cuda

Prints partial rows; bench/run.py puts them beside ours. AdamW(fused=True), the same
model and shapes. On the CPU one thread a rank and Gloo; on a GPU NCCL and autocast
to bfloat16. PyTorch's overlap of ZeRO with DDP refuses Gloo, so that its peer is
ZeRO without.
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


def time_of(body, device="cpu"):
    dist.barrier()
    start = time.perf_counter()
    body()
    slowest = torch.tensor([(time.perf_counter() - start) * 1e3], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def make_step(args, with_zero):
    torch.manual_seed(0)
    config = CONFIGS[args.config]
    model = DistributedDataParallel(Gpt(*config).to(args.device), gradient_as_bucket_view=True)
    if with_zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config[0], (config[5], config[4]), device=args.device)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda"):
            loss = F.cross_entropy(model(ids).view(-1, config[0]), ids.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps_of(step, device):
    def run():
        for _ in range(STEPS):
            step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def consolidation():
    params = [torch.zeros(520 * 512 if i % 2 == 0 else 512, requires_grad=True) for i in range(150)]
    for param in params:
        param.grad = torch.ones_like(param)
    zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-4)
    zero.step()
    return statistics.median(time_of(zero.consolidate_state_dict) for _ in range(CONSOLIDATIONS))


def run(rank, args, rendezvous, results):
    torch.set_num_threads(1)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks)
    sides = [make_step(args, False), make_step(args, True)]
    for _ in range(WARM_UP):
        for side in sides:
            side()
    times = [[], []]
    for _ in range(REPEATS):
        for side, own in zip(sides, times):
            own.append(time_of(steps_of(side, args.device), args.device) / STEPS)
    medians = [statistics.median(own) for own in times]
    if args.device == "cpu":
        medians.append(consolidation())
    if rank == 0:
        results.put(medians)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", choices=list(CONFIGS), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        context = mp.spawn(run, (args, rendezvous, results), args.ranks, join=False)
        ddp, zero, *consolidated = results.get()
        while not context.join():
            pass
    rows = [(f"ddp/gpt-{args.config}", "ddp", ddp)]
    rows += [(f"{family}/gpt-{args.config}", "zero", zero) for family in ("zero", "zero_overlap")]
    rows += [("zero/consolidate/20M", "zero", value) for value in consolidated]
    for name, peer, value in rows:
        print(json.dumps({"name": f"{name}/{args.device}{args.ranks}", "peers": {peer: round(value, 2)}}))


if __name__ == "__main__":
    main()
