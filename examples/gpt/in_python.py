#!/usr/bin/env python3
"""Opens a trained model in Python: python3 in_python.py RUN

Reads RUN/model.safetensors into the same GPT, written in PyTorch, and computes
its loss on the validation text. Needs torch alone; the safetensors package would
do the reading in one line.
"""

import json
import pathlib
import struct
import sys
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # not needed here
import torch
import torch.nn.functional as F
from torch import nn


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + size + begin : 8 + size + end])
        tensors[name] = torch.frombuffer(raw, dtype=dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        by_head = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocabulary, length, layers, heads, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def read_tokens(path):
    data = path.read_bytes()
    magic, token_bytes, _, count = struct.unpack("<8sIIQ", data[:24])
    assert magic == b"TESSTOK1", path
    dtype = torch.uint16 if token_bytes == 2 else torch.int32
    return torch.frombuffer(bytearray(data[24:]), dtype=dtype, count=count).long()


def read_log(path):
    """The lines of a log; a line that was cut off by a kill is left out."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            pass
    return lines


def main():
    if len(sys.argv) != 2 or not (pathlib.Path(sys.argv[1]) / "model.safetensors").exists():
        sys.exit("usage: in_python.py RUN, with RUN/model.safetensors by tessera ckpt convert")
    run = pathlib.Path(sys.argv[1])
    log = read_log(run / "log.jsonl")
    config = [line for line in log if line["kind"] == "start"][-1]["config"]
    shape, windows = config["model"], config["watching"]["eval-windows"]
    weights = read_safetensors(run / "model.safetensors")
    model = Gpt(len(weights["tokens.weight"]), shape["length"], shape["layers"], shape["heads"], shape["width"])
    model.load_state_dict(weights)
    print(f"   {sum(p.numel() for p in model.parameters()):,} parameters loaded into a torch.nn.Module")

    tokens = read_tokens(pathlib.Path(config["data"]["data"] or run / "data") / "validation.tokens")
    length = shape["length"]
    windows = min(windows, (len(tokens) - 1) // length)
    starts = [(len(tokens) - length - 1) * i // max(1, windows - 1) for i in range(windows)]
    ids = torch.stack([tokens[start : start + length + 1] for start in starts])
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).item()
    # The model is that of the newest checkpoint, which need not be one that was evaluated.
    step = max(line["step"] for line in log if line["kind"] == "checkpoint")
    evaluated = [line["loss"] for line in log if line["kind"] == "eval" and line["step"] == step]
    if not evaluated:
        print(f"   validation loss here {loss:.6f}; step {step} was not evaluated in C++ (gpt --mode eval --run {run})")
        return
    theirs = float(evaluated[-1])  # "nan" and "inf" are text
    print(f"   validation loss here {loss:.6f}, in C++ {theirs:.6f}")
    if not abs(loss - theirs) < 1e-4 * theirs:
        sys.exit("   They should be equal.")


if __name__ == "__main__":
    main()
