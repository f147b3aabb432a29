#!/usr/bin/env python3
"""Converts what Python's torch wrote, and reads the results with it.

Usage: python_reads.py TESSERA FOLDER
"""

import json
import os
import pathlib
import struct
import subprocess
import sys

import torch
import torch.distributed.checkpoint as dcp

TESSERA = sys.argv[1]
FOLDER = pathlib.Path(sys.argv[2])

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def ckpt(*words):
    done = subprocess.run([TESSERA, "ckpt", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def same(a, b, path=""):
    """Bit by bit, with types and order."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor), path
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{path}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        a, b = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert set(a) == set(b), f"{path}: {list(a)} against {list(b)}"
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list):
        assert isinstance(b, list) and len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{path}[{i}]")
    else:
        assert type(a) is type(b) and a == b, f"{path}: {a!r} against {b!r}"


def read_safetensors(path):
    """By the format's description; the package too, if it is here."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        if end > begin:
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=tensor.dtype)
            tensor = flat.reshape(entry["shape"])
        tensors[name] = tensor
    try:
        from safetensors.torch import load_file
    except ImportError:
        return tensors
    same(tensors, load_file(path))
    return tensors


def all_dtypes():
    return {name: (torch.randn(3, 5) * 3).abs().to(dtype) for name, dtype in DTYPES.items()}


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(2, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def like(state):
    """The same with other contents, for dcp.load() to fill."""
    if isinstance(state, torch.Tensor):
        return torch.empty_like(state, memory_format=torch.contiguous_format).copy_(torch.zeros(()))
    if isinstance(state, dict):
        return {key: like(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(value, (torch.Tensor, dict)) for value in state):
        return [like(value) for value in state]
    return None


def check_formats():
    """torch.save -> DCP -> torch, of every kind of value."""
    torch.manual_seed(0)
    wide = torch.randn(6, 8)
    state = {
        "dtypes": all_dtypes(),
        "views": {"t": wide.t(), "part": wide[1:4, 2:7], "empty": torch.empty(0, 4), "one": torch.tensor(2.5)},
        "list": [{"x": torch.ones(2)}, [1, 2]],
        "plain": [1, "two", 3.0, None, True],
        "epoch": 7,
        "odd. näme": torch.arange(3),
    }
    torch.save(state, FOLDER / "state.pt")
    ckpt("convert", FOLDER / "state.pt", FOLDER / "state", "--to", "dcp")
    loaded = like(state)
    dcp.load(loaded, checkpoint_id=FOLDER / "state", no_dist=True)
    same(state, loaded)
    ckpt("reshard", FOLDER / "state", FOLDER / "state3", "--world", 3)
    loaded = like(state)
    dcp.load(loaded, checkpoint_id=FOLDER / "state3", no_dist=True)
    same(state, loaded)
    ckpt("consolidate", FOLDER / "state3", FOLDER / "again.pt", "--to", "torch")
    same(state, torch.load(FOLDER / "again.pt", weights_only=True))
    torch.save(all_dtypes(), FOLDER / "dtypes.pt")
    ckpt("convert", FOLDER / "dtypes.pt", FOLDER / "dtypes.safetensors", "--to", "safetensors")
    same(torch.load(FOLDER / "dtypes.pt"), read_safetensors(FOLDER / "dtypes.safetensors"))


def check_torch_file():
    """Optimizers, int keys, empty dictionaries, tied weights: torch to torch."""
    model, optimizer = trained()
    state = model.state_dict()
    state["tied"] = state["0.weight"]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = {"model": dict(state), "optim": optimizer.state_dict(), "sgd": sgd.state_dict()}
    torch.save(whole, FOLDER / "whole.pt")
    ckpt("convert", FOLDER / "whole.pt", FOLDER / "copy.pt", "--to", "torch")
    loaded = torch.load(FOLDER / "copy.pt", weights_only=True)
    same(whole["optim"], loaded["optim"])
    same(whole["sgd"], loaded["sgd"])
    same(whole["model"], loaded["model"])
    tied, weight = loaded["model"]["tied"], loaded["model"]["0.weight"]
    assert tied.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    other, again = trained()
    again.load_state_dict(loaded["optim"])
    del loaded["model"]["tied"]
    other.load_state_dict(loaded["model"])
    ckpt(
        "convert", FOLDER / "whole.pt", FOLDER / "weights.safetensors", "--to", "safetensors",
        "--select", "model", "--strip-prefix", "model", "--dtype", "bfloat16",
    )  # fmt: skip
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}
    same(halves, read_safetensors(FOLDER / "weights.safetensors"))


def check_memory():
    """A tensor of 400 MB passes through in pieces."""
    big = torch.arange(100_000_000, dtype=torch.int32).reshape(1000, -1)
    torch.save({"big": big}, FOLDER / "big.pt")

    def peak(*words):
        """MB of the child, by its own count."""
        code = (
            "import resource, subprocess, sys\n"
            "done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)\n"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)\n"
            "sys.exit(done.returncode)\n"
        )
        words = [sys.executable, "-c", code, TESSERA, "ckpt", *map(str, words)]
        # Under ASan, what was freed would be kept and counted.
        asan = os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=1"
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "ASAN_OPTIONS": asan})
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    idle = peak("inspect", FOLDER / "big.pt")
    for kind, name in (("dcp", "big"), ("safetensors", "big.safetensors"), ("torch", "big2.pt")):
        used = peak("convert", FOLDER / "big.pt", FOLDER / name, "--to", kind)
        assert used < idle + 64, f"{kind}: {used} MB, {idle} MB without work"
    used = peak("diff", FOLDER / "big", FOLDER / "big2.pt")
    assert used < idle + 64, f"diff: {used} MB, {idle} MB without work"
    assert torch.equal(big, torch.load(FOLDER / "big2.pt", weights_only=True)["big"])


def main():
    check_formats()
    check_torch_file()
    check_memory()


if __name__ == "__main__":
    main()
