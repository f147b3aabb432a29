#!/usr/bin/env python3
"""The checkpoint of bench/checkpoint_bench.cpp under torch.distributed.checkpoint.

    python3 bench/peers/checkpoint.py --ranks 2 FOLDER
    python3 bench/peers/checkpoint.py --ranks 1 FOLDER     loads what two ranks saved

Prints partial rows; bench/run.py puts them beside ours. FSDP2 with AdamW, Gloo,
one thread a rank. Values are loaded in place into changed tensors and compared.
"""

import gc
import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import ranks
from gpt import Gpt

REPEATS = 4


def config(args):
    """As in checkpoint_bench.cpp."""
    return 1024, 96 if args.quick else 768, 12, 12, 64, 1


def measure(call):
    gc.collect()
    return ranks.milliseconds(call)


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


class Saves:
    """A sharded GPT and its optimizer, saved to and loaded from a folder."""

    def __init__(self, args):
        torch.manual_seed(0)
        self.folder = args.folder
        model = Gpt(*config(args))
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optim.step()
        optim.zero_grad(set_to_none=True)
        model_state, optim_state = get_state_dict(model, optim)
        self.state = {"model": model_state, "optim": optim_state}
        self.apart = dist.new_group(backend="gloo")
        self.times = {}

    def path(self, name):
        return os.path.join(self.folder, name)

    def keep(self, name, milliseconds):
        self.times.setdefault(name, []).append(milliseconds)

    def clean(self, name):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path(name), ignore_errors=True)
            os.sync()
        dist.barrier()

    def save(self):
        self.clean("py")
        return measure(lambda: dcp.save(self.state, checkpoint_id=self.path("py")))

    def load(self):
        """Loads into changed tensors, which must then have their old values."""
        before = [tensor.clone() for tensor in tensors(self.state)]
        for tensor in tensors(self.state):
            tensor.zero_()
        elapsed = measure(lambda: dcp.load(self.state, checkpoint_id=self.path("py")))
        assert all(torch.equal(a, b) for a, b in zip(before, tensors(self.state)))
        return elapsed

    def save_behind(self):
        self.clean("async")
        futures = []
        start = time.perf_counter()
        stall = measure(
            lambda: futures.append(
                dcp.async_save(
                    self.state, checkpoint_id=self.path("async"), process_group=self.apart
                )
            )
        )
        futures[0].result()
        self.keep("async_stall", stall)
        self.keep("async_until_done", (time.perf_counter() - start) * 1e3)


def run(_rank, args):
    saves = Saves(args)
    if args.ranks == 1:
        for _ in range(ranks.times(args, REPEATS)):
            saves.keep("load_world1", saves.load())
    else:
        saves.save()  # warms up
        for _ in range(ranks.times(args, REPEATS)):
            saves.keep("save", saves.save())
            saves.keep("load", saves.load())
            saves.save_behind()
        saves.clean("async")
    for name, values in saves.times.items():
        ranks.print_row(f"checkpoint/{name}/1GB/cpu{args.ranks}", {"dcp": values})


def main():
    parser = ranks.parser(__doc__)
    parser.add_argument("folder")
    args = parser.parse_args()
    ranks.on_ranks(run, args)
    if args.ranks == 1:
        shutil.rmtree(os.path.join(args.folder, "py"), ignore_errors=True)


if __name__ == "__main__":
    main()
