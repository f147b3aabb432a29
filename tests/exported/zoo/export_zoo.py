#!/usr/bin/env python3
"""Exports the models of the zoo and writes what Python gets from each of them.

    export_zoo.py FOLDER [--few | --only NAME,...]

FOLDER/NAME/ gets, for float32 and float64 (the same model, exported in that dtype):

    DTYPE.pt2                  the archive, as tessera_export.py writes it
    DTYPE.safetensors          input.0 ... (positional) and input.NAME (keywords);
                               target.0 ... for each floating output.
      float32: output.0 ... in train(), loss, gradient.NAME of every parameter that has
               one, buffer.NAME afterwards; eval_output.0 ... in eval()
      float64: losses of 5 steps of AdamW

The loss is the sum over floating outputs of mean((output - target)^2). Before each run
the seed is SEED plus the number of the step. A model that cannot run in double has no
float64 files. FOLDER/zoo.json says what became of each model, FOLDER/models.txt lists
those that were exported. The references come from what
torch.export.load() gives; tessera_export.py compares that with the model itself.
"""

import argparse
import json
import logging
import os
import pathlib
import shutil
import struct
import sys
import time
import warnings

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2] / "python"), str(HERE)]
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.utils._pytree as pytree
from tessera_export import ExportError, export
from torch.export.pt2_archive._package import load_pt2

SEED = 1000
STEPS = 5
SAFETENSORS_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.bool: "BOOL",
                     torch.bfloat16: "BF16", torch.int32: "I32"}


def write_safetensors(path, tensors):
    """docs/formats/safetensors.md; torch alone has no writer for it."""
    header, parts, offset = {}, [], 0
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(raw)]}
        parts.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def floating(outputs):
    return [leaf for leaf in tensors_of(outputs) if leaf.is_floating_point()]


def tensors_of(outputs):
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def loss_of(outputs, targets):
    loss = None
    for output, target in zip(floating(outputs), targets):
        part = (output - target).square().mean()
        loss = part if loss is None else loss + part
    return loss


def draw_targets(outputs):
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype) for leaf in floating(outputs)]


class Reference:
    """One exported model in one dtype, and what Python gets from it."""

    def __init__(self, path, args, kwargs):
        self.programs = load_pt2(str(path)).exported_programs
        self.args, self.kwargs = args, kwargs
        self.model = self.programs["model"].module()
        self.tensors = {f"input.{i}": t for i, t in enumerate(args)} | {f"input.{k}": t for k, t in kwargs.items()}

    def run(self, step=0):
        torch.manual_seed(SEED + step)
        return self.model(*self.args, **self.kwargs)

    def draw_targets(self):
        buffers = {b: b.detach().clone() for b in self.model.buffers()}
        with torch.no_grad():
            self.targets = draw_targets(self.run())
            for buffer, value in buffers.items():
                buffer.copy_(value)
        self.tensors |= {f"target.{i}": t for i, t in enumerate(self.targets)}

    def take_gradients(self):
        self.draw_targets()
        outputs = self.run()
        loss = loss_of(outputs, self.targets)
        loss.backward()
        self.tensors |= {f"output.{i}": t.detach().clone() for i, t in enumerate(tensors_of(outputs))}
        self.tensors["loss"] = loss
        self.tensors |= {f"gradient.{n}": p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.tensors |= {f"buffer.{n}": b for n, b in self.model.named_buffers()}
        torch.manual_seed(SEED)
        with torch.no_grad():
            evaluated = load_pt2_eval(self.programs)(*self.args, **self.kwargs)
        self.tensors |= {f"eval_output.{i}": t for i, t in enumerate(tensors_of(evaluated))}

    def take_losses(self):
        self.draw_targets()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(STEPS):
            loss = loss_of(self.run(step), self.targets)
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.tensors["losses"] = torch.stack(losses)


def load_pt2_eval(programs):
    return programs["eval"].module()


def export_in(dtype, entry, folder):
    torch.manual_seed(SEED)
    model, args, kwargs, shapes = entry.build()
    model = model.to(dtype).train()
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
    name = str(dtype).removeprefix("torch.")
    # The comparison with the model itself is the same in double, and half of the time.
    report = export(model, args, kwargs, shapes, folder / f"{name}.pt2", check=dtype == torch.float32)
    reference = Reference(folder / f"{name}.pt2", args, kwargs)
    reference.take_gradients() if dtype == torch.float32 else reference.take_losses()
    write_safetensors(folder / f"{name}.safetensors", reference.tensors)
    return model, report


def export_entry(entry, folder):
    """The entry's line in zoo.json."""
    began = time.monotonic()
    line = {"name": entry.name, "family": entry.family, "source": entry.source, "what": entry.what}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        model, report = export_in(torch.float32, entry, folder)
        line |= {"nodes": report.nodes["model"], "parameters": sum(p.numel() for p in model.parameters()),
                 "difference": max(report.difference.values()), "notes": report.notes}
    except ExportError as error:
        line["why"] = str(error)
    else:
        try:
            export_in(torch.float64, entry, folder)
        except Exception as error:  # models of Hugging Face that make float32 tensors on the way
            line["why_not_double"] = f"{type(error).__name__}: {error}"
            for file in folder.glob("float64.*"):
                file.unlink()
    line["seconds"] = round(time.monotonic() - began, 1)
    (folder / "line.json").write_text(json.dumps(line))
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--few", action="store_true", help="the dozen of every test run")
    which.add_argument("--only", help="names, with commas")
    parser.add_argument("--resume", action="store_true", help="keep what is exported already")
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the ranks have: sums are then in the same order
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)  # torch.export writes whole graphs where it fails

    import models

    names = models.FEW if options.few else options.only.split(",") if options.only else list(models.ENTRIES)
    lines = []
    for name in names:
        before = options.folder / name / "line.json"
        if options.resume and before.exists():
            lines.append(json.loads(before.read_text()))
            continue
        lines.append(export_entry(models.ENTRIES[name], options.folder / name))
        line = lines[-1]
        print(f"{name:32} {line['seconds']:5} s  "
              + (f"not exported: {line['why'].splitlines()[0][:150]}" if "why" in line else f"{line['nodes']} nodes"), flush=True)
    (options.folder / "zoo.json").write_text(json.dumps(lines, indent=1))
    (options.folder / "models.txt").write_text("".join(f"{line['name']}\n" for line in lines if "why" not in line))
    failed = [line["name"] for line in lines if "why" in line]
    print(f"exported {len(lines) - len(failed)} of {len(lines)} models" + (f"; not {', '.join(failed)}" if failed else ""))


if __name__ == "__main__":
    main()
