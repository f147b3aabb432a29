#!/usr/bin/env python3
"""The step of bench/step_bench.cpp under PyTorch's own FSDP2, FSDP1 and DDP.

    python3 bench/peers/steps.py --ranks 2

Prints one partial row; bench/run.py puts it beside ours. One thread a rank,
Gloo, AdamW(fused=True), the same model and data shapes.
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
import torch.nn.functional as F

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 128, 4, 12, 64, 4
REPEATS, STEPS, WARM_UP = 5, 6, 4
VARIANTS = ("fsdp2", "fsdp1", "ddp")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap(variant):
    torch.manual_seed(0)
    model = Gpt()
    if variant == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if variant == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
        )
    return nn.parallel.DistributedDataParallel(model)


def run(rank, size, rendezvous, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    trainers = {}
    for variant in VARIANTS:
        model = wrap(variant)
        trainers[variant] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))

    def step(model, optimizer):
        F.cross_entropy(model(ids).view(-1, VOCABULARY), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    times = {variant: [] for variant in VARIANTS}
    for trainer in trainers.values():
        for _ in range(WARM_UP):
            step(*trainer)
    for _ in range(REPEATS):  # the variants take turns
        for variant, trainer in trainers.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                step(*trainer)
            times[variant].append((time.perf_counter() - start) / STEPS * 1e3)
    if rank == 0:
        results.put({variant: statistics.median(values) for variant, values in times.items()})
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(args.ranks, os.path.join(folder, "meet"), results), nprocs=args.ranks)
    peers = {variant: round(value, 2) for variant, value in results.get().items()}
    print(json.dumps({"name": f"step/gpt-tiny/cpu{args.ranks}", "peers": peers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
