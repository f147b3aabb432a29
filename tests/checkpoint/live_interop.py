#!/usr/bin/env python3
"""Python's side of live_interop_test.cpp.

    live_interop.py dump CHECKPOINT OUT      reads all of a DCP folder, writes bytes
    live_interop.py resume CHECKPOINT OUT    loads it into FSDP2 and Adam on 2 ranks, steps, saves
    live_interop.py train OUT NEXT           trains FSDP2 and Adam on 2 ranks, saves, steps, saves
    live_interop.py objects OUT TEXT         saves a tensor, and objects of classes beside it
"""

import argparse
import json
import logging
import os
import pathlib
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def dump(checkpoint, out):
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(checkpoint),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    rows = []

    def walk(value, path):
        if isinstance(value, torch.Tensor):
            name = f"{len(rows)}.bin"
            data = value.contiguous().reshape(-1)
            (pathlib.Path(out) / name).write_bytes(
                data.view(torch.uint8).numpy().tobytes() if value.numel() else b""
            )
            rows.append([path, str(value.dtype)[6:], list(value.shape), name])
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, path + [key])
        elif isinstance(value, (list, tuple)) and any(
            isinstance(item, (dict, torch.Tensor)) for item in value
        ):
            for i, item in enumerate(value):
                walk(item, path + [i])
        else:
            rows.append([path, "value", value, ""])

    walk(state, [])
    (pathlib.Path(out) / "rows.json").write_text(json.dumps(rows))


def save_objects(out, text):
    extra = {"args": argparse.Namespace(text=text), "none": {}}
    state = {"model": {"weight": torch.arange(6.0)}, "extra": extra}
    dcp.save(state, checkpoint_id=out, no_dist=True)


def make_run():
    torch.manual_seed(9)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 2)
    )
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def step(model, optimizer):
    """On the input of live_interop_test.cpp."""
    optimizer.zero_grad()
    input = torch.arange(30, dtype=torch.float32).reshape(6, 5) / 10 - 1.5
    model(input).square().mean().backward()
    optimizer.step()


def load(model, optimizer, path):
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )


def save(model, optimizer, path):
    model_state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=path)


def on_rank(rank, rendezvous, mode, first, second):
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model, optimizer = make_run()
    if mode == "resume":
        load(model, optimizer, first)
        step(model, optimizer)
        save(model, optimizer, second)
    else:
        for _ in range(2):
            step(model, optimizer)
        save(model, optimizer, first)
        step(model, optimizer)
        save(model, optimizer, second)
    dist.barrier()
    os._exit(0)  # Gloo's threads abort now and then when Python takes them down


def main():
    mode, first, second = sys.argv[1:]
    if mode == "dump":
        dump(first, second)
        return
    if mode == "objects":
        save_objects(first, second)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (os.path.join(folder, "rendezvous"), mode, first, second), nprocs=2)


if __name__ == "__main__":
    main()
