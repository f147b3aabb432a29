#!/usr/bin/env python3
"""The step of bench/step_bench.cpp under PyTorch's own FSDP2, FSDP1 and DDP.

    python3 bench/peers/steps.py --ranks 2
    python3 bench/peers/steps.py --ranks 1 --config 124M --device cuda

Prints one partial row; bench/run.py puts it beside ours. AdamW(fused=True), the
same model and data shapes. On the CPU one thread a rank and Gloo; on a GPU NCCL
and bfloat16 (FSDP's mixed precision, autocast for DDP).
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

# vocabulary, width, heads, layers, length, batch
CONFIGS = {
    "tiny": (256, 128, 4, 12, 64, 4),
    "124M": (50304, 768, 12, 12, 1024, 8),
    "774M": (50304, 1280, 20, 36, 1024, 8),
}
REPEATS, STEPS, WARM_UP = 5, 6, 4
VARIANTS = ("fsdp2", "fsdp1", "ddp")


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, length, _batch):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap(variant, config, device):
    torch.manual_seed(0)
    model = Gpt(*config).to(device)
    is_cuda = device == "cuda"
    if variant == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if is_cuda:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if variant == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device(device),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if is_cuda else None,
        )
    return nn.parallel.DistributedDataParallel(model)


def measure(variant, config, device):
    """Milliseconds a step, and peak megabytes on a GPU; one variant at a time, as
    memory is not endless."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = wrap(variant, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    vocabulary, length, batch = config[0], config[4], config[5]
    ids = torch.randint(0, vocabulary, (batch, length), device=device)
    casts = device == "cuda" and variant == "ddp"

    def step():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=casts):
            logits = model(ids)
        F.cross_entropy(logits.view(-1, vocabulary).float(), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def synchronize():
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
    return statistics.median(times), peak


def run(rank, size, rendezvous, config, device, results):
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    times = {variant: measure(variant, config, device) for variant in VARIANTS}
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meet = os.path.join(folder, "meet")
        config = CONFIGS[args.config]
        mp.spawn(run, args=(args.ranks, meet, config, args.device, results), nprocs=args.ranks)
    measured = results.get()
    place = f"gpt-{args.config}/{args.device}{args.ranks}"
    peers = {variant: round(time, 2) for variant, (time, _) in measured.items()}
    print(json.dumps({"name": f"step/{place}", "peers": peers}))
    if args.device == "cuda":
        peers = {variant: round(peak) for variant, (_, peak) in measured.items()}
        print(json.dumps({"name": f"step/peak-memory/{place}", "peers": peers}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
