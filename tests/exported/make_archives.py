"""Writes the archives that the tests of src/exported/format read.

    make_archives.py FOLDER         all of them, each NAME.pt2 with NAME.json: what Python
                                    has in the tensors, for comparison bit by bit
    make_archives.py --tiny FILE    the seed of the fuzzer, without sample inputs
"""

import collections
import json
import pathlib
import sys
import zipfile
from typing import NamedTuple

import torch
from torch._export.serde.serialize import _TORCH_TO_SERIALIZE_DTYPE, serialize
from torch.export.pt2_archive import PT2ArchiveWriter
from torch.utils import _pytree


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Output(collections.OrderedDict):
    """Like a ModelOutput of Hugging Face: named fields in an order."""


def register_types():
    _pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")
    _pytree.register_pytree_node(
        Output,
        lambda output: (list(output.values()), list(output.keys())),
        lambda values, keys: Output(zip(keys, values)),
        serialized_type_name="tests.Output",
    )


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.rand(2, 3).t(), persistent=False)

    def forward(self, x):
        y = torch.nn.functional.dropout(self.linear(x), 0.1, self.training)
        return self.norm(y) + self.scale.sum()


class Model(torch.nn.Module):
    """Weights of every kind: tied, transposed, views of one storage, not persistent, constant."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.odd = torch.nn.ModuleDict({"a,b;c": torch.nn.Linear(4, 4)})
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = torch.nn.Parameter(torch.rand(2, 4).t())
        whole = torch.rand(12)
        self.register_buffer("left", whole[:5])
        self.register_buffer("right", whole[3:11].view(2, 4))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.tensor(2.5))

    def forward(self, x, *, mask=None, limits=(float("inf"), 1)):
        y = self.embedding(x)
        for block in self.blocks:
            y = block(y)
        y = self.odd["a,b;c"](self.odd["a,b;c"](y))
        with torch.no_grad():
            shift = (y + torch.tensor([1.0, 2.0, 3.0, 4.0])).clamp(max=limits[0])
        y = y + shift + self.turned.sum() + self.left.sum() + self.right.sum() + self.scalar
        return {"logits": self.head(y), "rest": (shift, [x.shape[0] * 2, None, self.empty])}


class Trees(torch.nn.Module):
    def forward(self, pair, ordered, items, default):
        output = Output(total=pair.first + ordered["k"], rest=items[0])
        return Pair(pair.second, items[2][1]), output, default


class EveryDtype(torch.nn.Module):
    NAMES = [
        "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float8_e4m3fn",
        "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16", "float32",
        "float64", "complex32", "complex64", "complex128",
    ]  # fmt: skip

    def __init__(self):
        super().__init__()
        for name in self.NAMES:
            bits = torch.arange(32, dtype=torch.uint8)
            dtype = getattr(torch, name)
            if dtype not in _TORCH_TO_SERIALIZE_DTYPE:
                continue  # schema 8.17 has fewer
            self.register_buffer("of_" + name, (bits % 2).bool() if name == "bool" else bits.view(dtype))

    def forward(self, x):
        return x + self.of_float32.sum()


class Branches(torch.nn.Module):
    """A graph with graphs in it, and with symbolic ints and floats."""

    def forward(self, x):
        rows = x.shape[0]
        y = torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t * float("nan"), (x,))
        return y.sum() / (rows / 2), torch.sym_max(rows, 3)


def export_model():
    rows = torch.export.Dim("rows", min=2, max=30)
    kwargs = {"mask": None, "limits": (float("inf"), 1)}
    shapes = {"x": {0: rows}, "mask": None, "limits": (None, None)}
    model = Model()
    return torch.export.export(model, (torch.arange(5),), kwargs, dynamic_shapes=shapes)


def described(tensor):
    data = tensor.detach().contiguous()
    # A tensor of no dimensions cannot be viewed as bytes, and NumPy lacks some dtypes.
    bits = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "sizes": list(tensor.shape), "bytes": bits.hex()}


def expect(folder, name, program):
    tensors = {**program.state_dict, **program.constants}
    (folder / f"{name}.json").write_text(json.dumps({path: described(value) for path, value in tensors.items()}))


def save(folder, name, program):
    torch.export.save(program, folder / f"{name}.pt2")
    expect(folder, name, program)


def save_two_programs(folder, name, shares_configs):
    """Train and eval, with the weights once."""
    program = export_model()
    torch.export.save(program, folder / "one.pt2")
    evaluated = torch.export.export(Model().eval(), (torch.arange(5),))
    with zipfile.ZipFile(folder / "one.pt2") as one, PT2ArchiveWriter(str(folder / f"{name}.pt2")) as archive:
        for entry in one.namelist():
            path = entry.split("/", 1)[1]
            if path.startswith((".data/", "archive_", "byteorder")):
                continue
            data = one.read(entry)
            archive.write_bytes(path, data)
            if path.endswith("_config.json") and shares_configs:
                archive.write_bytes(path.replace("model_", "eval_"), data)
        archive.write_bytes("models/eval.json", serialize(evaluated).exported_program)
    (folder / "one.pt2").unlink()
    expect(folder, name, program)


def save_fake(folder):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        program = torch.export.export(model, (torch.ones(2, 8),))
    program._example_inputs = None
    torch.export.save(program, folder / "fake.pt2")


def save_all(folder):
    torch.manual_seed(7)
    save(folder, "model", export_model())
    pair = Pair(torch.ones(2), torch.zeros(2))
    default = collections.defaultdict(list, z=torch.ones(1))
    items = [torch.ones(1), "text", {1: torch.ones(3)}]
    trees = torch.export.export(Trees(), (pair, collections.OrderedDict(k=torch.ones(2)), items, default))
    save(folder, "trees", trees)
    save(folder, "dtypes", torch.export.export(EveryDtype(), (torch.ones(1),)))
    branches = torch.export.export(
        Branches(), (torch.ones(5, 2),), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}}
    )
    save(folder, "branches", branches)
    save_two_programs(folder, "shared_configs", True)
    save_two_programs(folder, "one_config", False)
    save_fake(folder)


def save_tiny(path):
    torch.manual_seed(7)
    whole = path.with_suffix(".whole.pt2")
    torch.export.save(torch.export.export(torch.nn.Linear(2, 1), (torch.ones(1, 2),)), whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for entry in old.namelist():
            name = entry.split("/", 1)[1]
            if name.startswith(("data/sample_inputs", ".data")):
                continue
            data = old.read(entry)
            if name.startswith("models/"):
                program = json.loads(data)
                for node in program["graph_module"]["graph"]["nodes"]:
                    node["metadata"]["stack_trace"] = "tiny.py"
                data = json.dumps(program, separators=(",", ":"))
            # The time of an entry is the oldest that ZIP can say: the file is always the same.
            new.writestr(zipfile.ZipInfo("tiny/" + name), data)
    whole.unlink()


if __name__ == "__main__":
    if sys.argv[1] == "--tiny":
        save_tiny(pathlib.Path(sys.argv[2]))
    else:
        register_types()
        save_all(pathlib.Path(sys.argv[1]))
