#!/usr/bin/env python3
"""The optimizer state calls of bench/state_bench.cpp under PyTorch's FSDP1.

    python3 bench/peers/state.py --ranks 2

Prints partial rows; bench/run.py puts them beside ours. FSDP1 with flat
parameters, since with original ones it returns wrong moments on the CPU. Gloo,
one thread a rank.
"""

import argparse
import ctypes
import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from steps import Block, Gpt

CONFIG = (2560, 384, 6, 10, 64, 4)  # as in state_bench.cpp
REPEATS = 5


def peak_megabytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measure(call):
    """Milliseconds on the slowest rank."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    result = call()
    elapsed = torch.tensor([(time.perf_counter() - start) * 1e3])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    del result
    return elapsed.item()


def measure_peak(call):
    """Megabytes that it took at most on this rank, its result included."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that it takes new memory
    forget_peak()
    before = peak_megabytes()
    measure(call)
    return peak_megabytes() - before


def run(rank, size, rendezvous, results):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = FSDP(
        Gpt(*CONFIG), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    optim = torch.optim.Adam(model.parameters(), lr=1e-4)
    ids = torch.randint(0, CONFIG[0], (CONFIG[5], CONFIG[4]))
    for _ in range(2):
        model(ids).square().mean().backward()
        optim.step()
        optim.zero_grad()
    full = FSDP.full_optim_state_dict(model, optim)
    calls = {
        "full": lambda: FSDP.full_optim_state_dict(model, optim),
        "sharded": lambda: FSDP.sharded_optim_state_dict(model, optim),
        "scatter": lambda: FSDP.scatter_full_optim_state_dict(
            full if rank == 0 else None, model, optim=optim
        ),
    }
    peaks = {name: measure_peak(call) for name, call in calls.items()}  # warms up, too
    times = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            times[name].append(measure(call))
    if rank == 0:
        results.put({name: (statistics.median(times[name]), peaks[name]) for name in calls})
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
    for name, (time_taken, peak) in results.get().items():
        place = f"{name}/20M/cpu{args.ranks}"
        print(json.dumps({"name": f"state/{place}", "peers": {"fsdp1": round(time_taken, 2)}}))
        print(json.dumps({"name": f"state/peak-memory/{place}", "peers": {"fsdp1": round(peak, 1)}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
