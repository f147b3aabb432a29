#!/usr/bin/env python3
"""Opens a folder in the layout of Hugging Face: every tensor that the index names.

    open_safetensors.py FOLDER

With the safetensors package where it is installed; the headers are read by hand
in any case.
"""

import json
import pathlib
import struct
import sys

try:
    import safetensors
except ImportError:
    safetensors = None

ITEM_BYTES = {"F32": 4, "BF16": 2}


def header_of(path):
    """Name -> (dtype, shape), after its arithmetic was checked."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__", None)
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        size = ITEM_BYTES[entry["dtype"]]
        for dim in entry["shape"]:
            size *= dim
        assert begin == at and end - begin == size, f"{path.name}: {name} lies at {begin} to {end}"
        at = end
    assert 8 + length + at == len(data), f"{path.name} has bytes behind its tensors"
    return {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items()}


def open_with_package(path, expected):
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(expected), f"{path.name}: other names"
        for name, (dtype, shape) in expected.items():
            part = file.get_slice(name)
            assert (part.get_dtype(), part.get_shape()) == (dtype, shape), name


def main():
    folder = pathlib.Path(sys.argv[1])
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: header_of(folder / name) for name in sorted(set(weight_map.values()))}
    assert len(files) > 1, "the model is not in several files"
    for name, file in weight_map.items():
        assert name in files[file], f"{name} is not in {file}"
    for name in ("lm_head.weight", f"model.layers.{layers - 1}.self_attn.q_proj.weight"):
        assert name in weight_map, f"there is no {name}"
    if safetensors:
        for name, expected in files.items():
            open_with_package(folder / name, expected)
    how = f"safetensors {safetensors.__version__}" if safetensors else "by hand"
    print(f"{len(weight_map)} tensors in {len(files)} files, opened {how}")


if __name__ == "__main__":
    main()
