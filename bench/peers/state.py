#!/usr/bin/env python3
"""The optimizer state calls of bench/state_bench.cpp under PyTorch's FSDP1.

    python3 bench/peers/state.py --ranks 2

Prints partial rows; bench/run.py puts them beside ours. FSDP1 with flat
parameters, since with original ones it returns wrong moments on the CPU. Gloo,
one thread a rank.
"""

import ctypes
import gc

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ranks
from gpt import Block, Gpt

CONFIG = (2560, 384, 6, 10, 64, 4)  # as in state_bench.cpp
REPEATS = 3


def peak_megabytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def measure(call):
    """Milliseconds; what it returns is dropped after the clock has stopped."""
    gc.collect()
    kept = []
    return ranks.milliseconds(lambda: kept.append(call()))


def measure_peak(call):
    """The peak of memory of a call on this rank in megabytes, including its result."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that it takes new memory
    forget_peak()
    before = peak_megabytes()
    measure(call)
    return peak_megabytes() - before


def run(rank, args):
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
    for _ in range(ranks.times(args, REPEATS)):
        for name, call in calls.items():
            times[name].append(measure(call))
    for name in calls:
        place = f"{name}/20M/cpu{args.ranks}"
        ranks.print_row(f"state/{place}", {"fsdp1": times[name]})
        ranks.print_row(f"state/peak-memory/{place}", {"fsdp1": [peaks[name]]})


if __name__ == "__main__":
    ranks.on_ranks(run, ranks.parser(__doc__).parse_args())
