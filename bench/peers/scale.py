#!/usr/bin/env python3
"""A step of Python's FSDP2 in a world that is not there: the peer of bench/scale_bench.cpp.

    python3 bench/peers/scale.py --ranks 16384
"""

import logging
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import gpt
import ranks

# vocabulary, width, heads, layers, length, batch
CONFIG = (256, 256, 4, 24, 8, 1)
REPEATS = 3


def milliseconds(call):
    """That this process computes."""
    start = time.process_time()
    call()
    return (time.process_time() - start) * 1e3


def make_step(ids):
    torch.manual_seed(0)
    model = gpt.Gpt(*CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step():
        gpt.loss_of(model, ids).backward()
        model.zero_grad()

    return step


def main():
    args = ranks.parser(__doc__).parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    ids = gpt.make_ids(CONFIG, "cpu")
    step = make_step(ids)
    step()
    samples = [milliseconds(step) for _ in range(ranks.times(args, REPEATS))]
    ranks.print_row(f"scale/step/dim0/w{args.ranks}", {"fsdp2": samples})


if __name__ == "__main__":
    main()
