#!/usr/bin/env python3
"""The checkpoint of bench/checkpoint_bench.cpp under torch.distributed.checkpoint.

    python3 bench/peers/checkpoint.py --ranks 2 FOLDER
    python3 bench/peers/checkpoint.py --ranks 1 FOLDER     loads what two ranks saved

Prints partial rows; bench/run.py puts them beside ours. FSDP2 with AdamW, Gloo,
one thread a rank. Values are loaded in place into changed tensors and compared.
"""

import argparse
import gc
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from steps import Gpt

CONFIG = (1024, 768, 12, 12, 64, 1)  # as in checkpoint_bench.cpp
REPEATS = 7


def measure(call):
    """Milliseconds on the slowest rank, and what it returned."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    result = call()
    elapsed = torch.tensor([(time.perf_counter() - start) * 1e3])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item(), result


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield local(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors(item)


def run(rank, size, rendezvous, folder, results):
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = Gpt(*CONFIG)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    optim.zero_grad(set_to_none=True)
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state}
    times = {}

    def keep(name, milliseconds):
        times.setdefault(name, []).append(milliseconds)

    def clean(name):
        dist.barrier()
        if rank == 0:
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
            os.sync()
        dist.barrier()

    def load_checked(name):
        before = [tensor.clone() for tensor in tensors(state)]
        for tensor in tensors(state):
            tensor.zero_()
        milliseconds, _ = measure(lambda: dcp.load(state, checkpoint_id=os.path.join(folder, "py")))
        keep(name, milliseconds)
        assert all(torch.equal(a, b) for a, b in zip(before, tensors(state)))

    if size == 1:
        for _ in range(REPEATS):
            milliseconds, _ = measure(
                lambda: dcp.load(state, checkpoint_id=os.path.join(folder, "py"))
            )
            keep("load_world1/1GB", milliseconds)
    else:
        apart = dist.new_group(backend="gloo")
        place = f"/1GB/cpu{size}"
        for repeat in range(-1, REPEATS):
            clean("py")
            milliseconds, _ = measure(
                lambda: dcp.save(state, checkpoint_id=os.path.join(folder, "py"))
            )
            if repeat < 0:
                continue  # warms up
            keep("save" + place, milliseconds)
            load_checked("load" + place)
            clean("async")
            start = time.perf_counter()
            milliseconds, future = measure(
                lambda: dcp.async_save(
                    state, checkpoint_id=os.path.join(folder, "async"), process_group=apart
                )
            )
            future.result()
            keep("async_stall" + place, milliseconds)
            keep("async_until_done" + place, (time.perf_counter() - start) * 1e3)
        clean("async")
    if rank == 0:
        for name, values in times.items():
            results.put({"name": "checkpoint/" + name, "peers": {"dcp": statistics.median(values)}})
    dist.barrier()
    os._exit(0) if rank else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("folder")
    args = parser.parse_args()
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(
            run,
            (args.ranks, os.path.join(scratch, "rendezvous"), args.folder, results),
            nprocs=args.ranks,
        )
        while not results.empty():
            print(json.dumps(results.get()), flush=True)
    if args.ranks == 1:
        shutil.rmtree(os.path.join(args.folder, "py"), ignore_errors=True)


if __name__ == "__main__":
    main()
