#!/usr/bin/env python3
"""Writes goldens/: what Python's torch writes, small, for the tests beside it.

Usage: goldens.py    (torch 2.13, safetensors)

  plain/           a DCP folder of one process: dtypes, scalars, empty tensors, nested names
  flat.metadata    saved without flattening: no planner_data
  fsdp2.metadata   two ranks, FSDP2 and Adam; uneven rows, so that a rank has none
  old.metadata     as early releases of 2.x wrote it: other modules, fewer fields
  *.pt             torch.save: weights, an optimizer's state, every kind of value
  *.safetensors    safetensors.torch.save_file, and an index
"""

import collections
import json
import os
import pathlib
import pickle
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

HERE = pathlib.Path(__file__).resolve().parent / "goldens"

# interop.py compares with this too when it reads it back in Python.
PLAIN = {
    "model": collections.OrderedDict(
        [("w", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16))]
    ),
    "optim": {"param_groups": [{"lr": 0.1, "params": [0, 1]}], "state": {0: {"step": torch.tensor(3.0)}}},
    "empty": torch.empty(0, 3),
    "epoch": 4,
    "odd name, ünïcode": torch.tensor([True, False]),
}

KINDS = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 255, 256, 65535, 65536, -1, 2**31, -(2**63), 2**63 - 1],
    "float": 0.1,
    "text": "grün",
    "bytes": b"ab\xff\x00",
    "no_bytes": b"",
    "bytearray": bytearray(b"x"),
    "complex": 1 + 2j,
    "tuple": (1, (2, 3), ()),
    "set": {7},
    "counter": collections.Counter({3: 1}),
    "size": torch.Size([2, 3]),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "uint16": torch.ones(2).to(torch.uint16),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "conj": torch.tensor([1 + 2j]).conj(),
    "view": torch.arange(12.0).reshape(3, 4)[1:, 2:],
    "transposed": torch.arange(6).reshape(2, 3).t(),
    5: "a number as key",
}


class Rows(torch.nn.Module):
    """One row: with two ranks the second rank has none."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(3, 5)
        self.row = torch.nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.wide(x).sum() + self.row(x[:, :2]).sum()


def save_fsdp2(rank, folder, store):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    torch.manual_seed(0)
    model = Rows()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).backward()
    optimizer.step()
    state, optim = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim, "step": 1}, checkpoint_id=folder)
    dist.destroy_process_group()


def save_old(source):
    """Such a release is not available here: the same objects under the names they had."""
    metadata = pickle.loads(source.read_bytes())
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = OldProperties(dtype=entry.properties.dtype)
    for name in ("storage_meta", "version"):
        del metadata.__dict__[name]
    (HERE / "old.metadata").write_bytes(pickle.dumps(metadata))


def save_safetensors():
    from safetensors.torch import save_file

    tensors = {
        "w": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "i": torch.tensor([-1]),
        "m": torch.tensor([True, False, True]),
        "e": torch.empty(0, 4),
        "s": torch.tensor(2.5, dtype=torch.float64),
    }
    save_file(tensors, HERE / "kinds.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": 59}, "weight_map": {name: "kinds.safetensors" for name in tensors}}
    (HERE / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    os.chdir(HERE)  # checkpoint_id is stored as it is given
    dcp.save(PLAIN, checkpoint_id="plain", no_dist=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
        dcp.save({"w": torch.ones(2)}, checkpoint_id="flat", planner=planner, no_dist=True)
        shutil.copy("flat/.metadata", HERE / "flat.metadata")
        mp.spawn(save_fsdp2, ("two", f"{folder}/store"), nprocs=2)
        shutil.copy("two/.metadata", HERE / "fsdp2.metadata")
    os.chdir(HERE)
    save_old(HERE / "fsdp2.metadata")
    torch.save(KINDS, "kinds.pt")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tied = model.state_dict()
    tied["tied"] = tied["weight"]
    torch.save(tied, "weights.pt")
    torch.save(optimizer.state_dict(), "optim.pt")
    save_safetensors()


if __name__ == "__main__":
    main()
