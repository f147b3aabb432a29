#!/usr/bin/env python3
"""Models and tokens for the tests of `gpt --model`, and the same steps in Python.

    python_models.py export FOLDER
    python_models.py compare MODEL.pt2 TOKENS LOG.jsonl TRAINED.safetensors

`export` writes small language models that differ in what they take and return. `compare` trains
MODEL on all windows of TOKENS at once, with the learning rates that the log has, and prints the
largest differences of losses and of parameters.
"""

import json
import pathlib
import struct
import sys
import warnings

warnings.filterwarnings("ignore")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "python"))

import tessera_export
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH = 256, 16
LENGTH = 16  # of the windows of `compare`


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]  # of what was before
        return x + self.down(F.gelu(self.up(self.norm(x + mean))))


class Model(nn.Module):
    """What a causal language model is made of; `form` says what it takes and returns."""

    def __init__(self, form="dict", dropout=0.0, tied=False):
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("mix", torch.eye(WIDTH) + 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def logits(self, ids):
        x = self.embed(ids) @ self.mix  # refuses two dtypes
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))

    def forward(self, input_ids, attention_mask=None, position_ids=None, targets=None, labels=None):
        logits = self.logits(input_ids)
        if self.form == "mask":  # wrong unless all are ones, and the places are 0, 1, 2, ...
            steps = torch.arange(input_ids.shape[1]) - position_ids
            return {"logits": logits * attention_mask[:, :, None] + steps[:, :, None]}
        if self.form == "tuple":
            return logits, logits.sum(-1, keepdim=True)[:, :, 0]
        if self.form == "tensor":
            return logits
        if self.form == "last":
            return logits[:, -1:, :]
        if self.form in ("loss", "both"):
            loss = 2 * F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            return {"loss": loss} if self.form == "loss" else {"loss": loss, "logits": logits}
        if self.form == "labels":  # as in Hugging Face's models
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}
        if self.form == "two":
            return {"first": logits, "second": 2 * logits}
        return {"logits": logits}


def export(folder):
    folder.mkdir(parents=True, exist_ok=True)
    ids = torch.randint(0, VOCABULARY, (4, 8))
    sizes = {0: torch.export.Dim("rows", min=1, max=64), 1: torch.export.Dim("length", min=3, max=32)}

    def write(name, model, kwargs=None, dynamic=True, args=(ids,), **options):
        shapes = {"input_ids": sizes, **{key: sizes for key in kwargs or {}}} if dynamic else None
        tessera_export.export(model, args, kwargs, shapes, folder / f"{name}.pt2", **options)

    torch.manual_seed(0)
    for form in ("tuple", "tensor", "two", "last"):
        write(form, Model(form))
    for form in ("loss", "both"):
        write(form, Model(form), {"targets": ids})
    write("labels", Model("labels"), {"labels": ids})
    write("mask", Model("mask"), {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(8).expand(4, 8)})
    write("fixed", Model(), dynamic=False)  # 4 rows of 8 tokens
    write("fixed_loss", Model("loss"), {"targets": ids}, dynamic=False)
    write("bf16", Model().to(torch.bfloat16))
    write("fp16", Model().to(torch.float16))
    write("double", Model().double())
    with tessera_export.without_weights():
        empty, tied_empty = Model(), Model(tied=True)
    write("empty", empty)
    write("tied_empty", tied_empty)
    tied = Model(tied=True)
    write("tied", tied)
    for name, training in (("frozen_training", True), ("frozen_evaluation", False)):
        program = torch.export.export(Model(dropout=0.1).train(training), (ids,), dynamic_shapes={"input_ids": sizes})
        torch.export.save(program, folder / f"{name}.pt2")

    class Unusual(Model):
        def forward(self, input_ids, temperature):
            return self.logits(input_ids) / temperature

    write("unusual", Unusual(), {"temperature": torch.ones(4, 8, 1)}, dynamic=False)
    tokens = torch.randint(0, 97, (8 * LENGTH + 1,)).tolist()  # 8 windows
    for name, vocabulary in (("windows", VOCABULARY), ("hundred", 100)):
        header = struct.pack("<8sIIQ", b"TESSTOK1", 2, vocabulary, len(tokens))
        (folder / f"{name}.tokens").write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))
    write_safetensors(folder / "weights.safetensors", Model().state_dict())
    state = tied.state_dict()
    del state["head.weight"]  # as save_pretrained() does
    write_safetensors(folder / "tied.safetensors", state)
    del state["embed.weight"]
    write_safetensors(folder / "neither.safetensors", state)


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", entry
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + size + begin : 8 + size + end])
        tensors[name] = torch.frombuffer(raw, dtype=torch.float32).reshape(entry["shape"])
    return tensors


def compare(model_path, tokens_path, log, trained):
    model = torch.export.load(model_path).module()
    raw = tokens_path.read_bytes()
    tokens = torch.tensor(struct.unpack(f"<{(len(raw) - 24) // 2}H", raw[24:]))
    inputs, targets = tokens[:-1].view(-1, LENGTH), tokens[1:].view(-1, LENGTH)
    steps = [entry for entry in map(json.loads, log.read_text().splitlines()) if entry["kind"] == "step"]
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95))
    worst = 0.0
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = step["lr"]
        loss = F.cross_entropy(model(inputs)["logits"].flatten(0, 1), targets.flatten())
        worst = max(worst, abs(loss.item() - step["loss"]) / loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    found, wanted = read_safetensors(trained), model.state_dict()
    assert sorted(found) == sorted(wanted), (sorted(found), sorted(wanted))
    model.load_state_dict(found)  # strict
    apart = max((found[name] - wanted[name]).abs().max().item() for name in found)
    print(json.dumps({"steps": len(steps), "loss": worst, "parameters": apart}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "export":
        export(pathlib.Path(sys.argv[2]))
    else:
        compare(*map(pathlib.Path, sys.argv[2:6]))
