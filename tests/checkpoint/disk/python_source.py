#!/usr/bin/env python3
"""Writes checkpoints with Python's torch, and their contents byte by byte.

Usage: python_source.py FOLDER

FOLDER/manifest has one line for each tensor, by tabs: checkpoint, name, dtype,
sizes, file with its bytes, row by row; and for each other name: checkpoint,
name, "value".
"""

import collections
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def plain_state():
    torch.manual_seed(0)
    wide = torch.randn(6, 8)
    return {
        "dtypes": {str(dtype): (torch.randn(3, 5) * 3).abs().to(dtype) for dtype in DTYPES},
        "large": torch.randn(700, 1001),
        "scalar": torch.tensor(1.5),
        "no rows": torch.empty(0, 4),
        "no columns": torch.empty(4, 0),
        "transposed": wide.t(),
        "a view": wide[1:4, 2:7],
        "every other": torch.arange(20)[::2],
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nested": [{"w": torch.ones(2)}, [torch.zeros(3), 7], (1, 2)],
        "tied": [wide, wide],
        "ordered": collections.OrderedDict(b=torch.ones(1), a=None),
        "state": {0: {"step": 3}, 1: {"step": torch.tensor(4)}},
        "ünïcode. and dots..": torch.tensor([1, 2]),
        "list": [1, [2, 3]],
        "text": "x",
    }


class Rows(torch.nn.Module):
    """One row: with two ranks the second rank has none."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(3, 5)
        self.row = torch.nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.wide(x).sum() + self.row(x[:, :2]).sum()


class Recorder:
    def __init__(self, folder):
        self.folder = folder
        self.lines = []

    def add(self, checkpoint, state):
        flat, _ = flatten_state_dict(state)
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                self.lines.append([checkpoint, name, "value"])
                continue
            if isinstance(value, DTensor):
                value = value.full_tensor()
            value = value.detach().contiguous()
            file = f"bytes-{checkpoint}-{len(self.lines)}"
            self.folder.joinpath(file).write_bytes(bytes(value.reshape(-1).view(torch.uint8).tolist()))
            sizes = ",".join(map(str, value.shape))
            self.lines.append([checkpoint, name, str(value.dtype).split(".")[1], sizes, file])

    def write(self):
        self.folder.joinpath("manifest").write_text("".join("\t".join(line) + "\n" for line in self.lines))


def one_rank(rank, folder, store):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2,))
    recorder = Recorder(folder)
    torch.manual_seed(0)

    def trained(wrap):
        model = wrap(Rows())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).backward()
        optimizer.step()
        state, optim = get_state_dict(model, optimizer)
        return {"model": state, "optim": optim, "step": 1}

    def fsdp1(model):
        return FullyShardedDataParallel(
            model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
        )

    def fsdp2(model):
        fully_shard(model, mesh=mesh)
        return model

    full = torch.randn(7, 9)
    states = {
        "fsdp2": trained(fsdp2),
        "fsdp1": trained(fsdp1),
        "columns": {
            "columns": distribute_tensor(full, mesh, [Shard(1)]),
            "everywhere": distribute_tensor(full, mesh, [Replicate()]),
        },
    }
    for name, state in states.items():
        dcp.save(state, checkpoint_id=folder / name)
        recorder.add(name, state)
    if rank == 0:
        plain = plain_state()
        dcp.save(plain, checkpoint_id=folder / "plain", no_dist=True)
        recorder.add("plain", plain)
        torch.save(plain, folder / "plain.pt")
        recorder.add("plain.pt", plain)
        recorder.write()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads abort now and then when Python takes them down


def main():
    folder = pathlib.Path(sys.argv[1])
    mp.spawn(one_rank, (folder, folder / "store"), nprocs=2)


if __name__ == "__main__":
    main()
