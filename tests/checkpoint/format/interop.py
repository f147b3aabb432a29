#!/usr/bin/env python3
"""Compares what Tessera wrote with the goldens it was read from.

Usage: interop.py GOLDENS OURS
"""

import io
import pathlib
import pickle
import sys
import zipfile

import torch
import torch.distributed.checkpoint as dcp


def same(a, b):
    """Equal, tensors bit by bit with their dtype and strides."""
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b)
            and (a.dtype, a.shape, a.stride(), a.requires_grad, a.is_conj())
            == (b.dtype, b.shape, b.stride(), b.requires_grad, b.is_conj())
            and bytes(a.untyped_storage()) == bytes(b.untyped_storage())
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def check_metadata(golden, ours):
    """dcp's dataclasses compare by their fields, MetadataIndex without its hint."""
    a, b = (pickle.loads(path.read_bytes()) for path in (golden, ours))
    assert a.state_dict_metadata.keys() == b.state_dict_metadata.keys()
    for name, entry in a.state_dict_metadata.items():
        other = b.state_dict_metadata[name]
        if hasattr(entry, "properties"):
            # Written with the current class, whatever it was read as.
            assert entry.properties.__getstate__()[0] == other.properties.__getstate__()[0], name
            assert entry.size == other.size and entry.chunks == other.chunks, name
            if type(entry.properties) is type(other.properties):
                assert entry == other, name
        else:
            assert entry == other, name
    assert a.planner_data == b.planner_data
    assert a.storage_data == b.storage_data
    assert {k: k.index for k in a.storage_data} == {k: k.index for k in b.storage_data}
    assert getattr(a, "version", None) == b.version
    meta = getattr(a, "storage_meta", None)
    if meta is not None:
        meta.checkpoint_id = str(meta.checkpoint_id)
    assert meta == b.storage_meta


def check_dcp_load(golden, ours):
    """A folder of torch with our .metadata, loaded by torch."""

    def load(folder):
        state = {
            "model": {"w": torch.zeros(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)},
            "optim": {"param_groups": [{"lr": 0.0, "params": []}], "state": {0: {"step": torch.zeros(())}}},
            "empty": torch.ones(0, 3),
            "epoch": 0,
            "odd name, ünïcode": torch.zeros(2, dtype=torch.bool),
        }
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state

    loaded = load(ours)
    assert loaded["epoch"] == 4 and loaded["optim"]["param_groups"][0]["lr"] == 0.1
    assert loaded["model"]["w"].sum() == 15
    assert same(loaded, load(golden))


def check_torch_file(golden, ours):
    """Our pickle in torch's archive, loaded by torch.load(weights_only=True)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(golden) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            data = ours.read_bytes() if name.endswith("/data.pkl") else source.read(name)
            target.writestr(name, data)
    buffer.seek(0)
    a = torch.load(golden, weights_only=False)  # empty bytes are refused otherwise, torch's own too
    b = torch.load(buffer, weights_only=True)
    assert same(a, b), f"{golden.name}: {a} against {b}"
    if golden.name == "weights.pt":
        assert b["tied"].untyped_storage().data_ptr() == b["weight"].untyped_storage().data_ptr()


def main():
    goldens, ours = map(pathlib.Path, sys.argv[1:])
    for name in ("plain/.metadata", "flat.metadata", "fsdp2.metadata", "old.metadata"):
        check_metadata(goldens / name, ours / name)
    check_dcp_load(goldens / "plain", ours / "plain")
    for name in ("kinds", "weights", "optim"):
        check_torch_file(goldens / f"{name}.pt", ours / f"{name}.pkl")


if __name__ == "__main__":
    main()
