"""Models whose buffers and parameters share memory or change while they run, and files that are refused, for
export_cases.py.
"""

import json
import zipfile

import torch
import torch.nn as nn
from torch.export import Dim


class Anchor(nn.Module):
    """A buffer that is the memory of a parameter, but gets no gradient."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("anchor", self.fc.weight.detach())

    def forward(self, x):
        return self.fc(x) @ self.anchor


class FrozenCopy(nn.Module):
    """A frozen parameter that is the memory of one that is trained."""

    def __init__(self):
        super().__init__()
        self.fc, self.copy = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.copy.weight = nn.Parameter(self.fc.weight.data, requires_grad=False)

    def forward(self, x):
        return self.copy(torch.tanh(self.fc(x)))


class Columns(nn.Module):
    """Two parameters in one memory that have no element in common."""

    def __init__(self):
        super().__init__()
        whole = torch.randn(4, 8)
        self.left, self.right = nn.Parameter(whole[:, :4]), nn.Parameter(whole[:, 4:])

    def forward(self, x):
        return torch.tanh(x @ self.left) @ self.right


class Overlapping(nn.Module):
    """Two buffers that have elements in common; a write to one changes both."""

    def __init__(self):
        super().__init__()
        whole = torch.arange(6.0)
        self.register_buffer("early", whole[:4])
        self.register_buffer("late", whole[2:])
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.early.add_(1)
        return self.fc(x) + self.late


class Typed(nn.Module):
    """Changes a buffer behind type_as(), which returns it as it is and does not say so."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("stat", torch.ones(4))

    def forward(self, x):
        self.stat.type_as(x).mul_(0.9).add_(x.detach().mean(0))
        return torch.tanh(self.fc(x) + self.stat)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return torch.tanh(self.fc(x) + self.shift)


class Indexed(nn.Module):
    """Its node has a list of tensors; the program has no constant."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, rows):
        return self.fc(x)[rows]


class Around(nn.Module):
    """Calls a block, which can be recomputed."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args):
        return self.block(*args)


class ChangedLater(Around):
    """Changes a buffer that the block has read."""

    def forward(self, x):
        y = self.block(x)
        self.block.shift.mul_(2)
        return y


class Counted(nn.Module):
    """Its result depends on a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.tensor(1.0))

    def forward(self, x):
        self.count += 1
        return torch.tanh(self.fc(x) + self.count)


class Even(nn.Module):
    """A condition on an input that has no name."""

    def forward(self, *args):
        x = args[0]
        torch._check(x.shape[0] % 2 == 0)
        return x.reshape(x.shape[0] // 2, 2, -1).sum(1)


class TwoDtypes(nn.Module):
    """One part computes in bfloat16."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4)

    def forward(self, x):
        return self.high(self.low(x.to(torch.bfloat16)).float())


class TwoNamed(nn.Module):
    """Two inputs of one shape, given by name at the export."""

    def forward(self, ids, mask, scale=1):
        return ids * mask.sum(-1, keepdim=True) * scale


class Stage(nn.Module):
    """Counts its calls, and computes with the count."""

    def __init__(self, dropout):
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(dropout)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls.add_(1)
        return x + torch.tanh(self.drop(self.fc(x)) + self.calls)


class Again(nn.Module):
    """A block that is called three times by one path, and once more by another one."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Stage(dropout) for _ in range(2))
        self.last = self.blocks[0]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(self.blocks[0](self.blocks[0](x)))


def cases():
    x = torch.randn(3, 4)
    yield "anchor", Anchor(), (x,), {}, None, False
    yield "frozen_copy", FrozenCopy(), (x,), {}, None, False
    yield "columns", Columns(), (x,), {}, None, False
    yield "overlapping", Overlapping(), (x,), {}, None, False
    yield "typed", Around(Typed()), (x,), {}, None, False
    yield "changed_later", ChangedLater(Scaled()), (x,), {}, None, False
    yield "indexed", Around(Indexed()), (x, torch.tensor([0, 2])), {}, None, False
    yield "counted", Counted(), (x,), {}, None, False
    yield "counted_decomposed", Counted(), (x,), {}, None, True
    yield "again", Again(0.5), (x,), {}, None, False
    yield "two_dtypes", TwoDtypes(), (x,), {}, None, False
    yield "two_named", TwoNamed(), (), {"mask": torch.rand(3, 4), "ids": x, "scale": 2}, None, False
    yield "one_named", TwoNamed(), (x,), {"mask": torch.rand(3, 4), "scale": 2}, None, False


def write_guarded(folder):
    """The condition names the input in two ways."""
    for name, strict in (("guard_args", False), ("guard_strict", True)):
        shapes = {"args": ({0: Dim.AUTO},)}
        program = torch.export.export(Even(), (torch.randn(8, 3),), dynamic_shapes=shapes, strict=strict)
        torch.export.save(program, folder / f"{name}.pt2")


def write_changed(folder):
    """Copies of both_modes.pt2 and of other cases whose programs are changed."""

    def copy(name, source, change, renamed=()):
        with zipfile.ZipFile(folder / f"{source}.pt2") as old, zipfile.ZipFile(folder / f"{name}.pt2", "w") as new:
            for entry in old.infolist():
                data = old.read(entry)
                if "/models/" in entry.filename and entry.filename.endswith(".json"):
                    program = json.loads(data)
                    change(program, entry.filename.rsplit("/", 1)[1])
                    data = json.dumps(program)
                filename = entry.filename
                for text in renamed:
                    filename = filename.replace(text, renamed[text])
                new.writestr(filename, data)

    def set_target(program, index, target):
        program["graph_module"]["graph"]["nodes"][index]["target"] = f"torch.ops.{target}"

    def lack(program, name):
        set_target(program, 0, "aten.one.default" if name == "model.json" else "aten.other.default")

    def lack_and_guard(program, name):
        lack(program, name)
        program["guards_code"] = ["odd(1)"]

    def close(program, _):
        set_target(program, 0, "aten.from_file.default")
        set_target(program, 1, "tessera.read_exported.default")
        set_target(program, 2, "c10d.barrier.default")

    def return_list(program, _):
        graph = program["graph_module"]["graph"]
        graph["outputs"][0] = {"as_tensors": [graph["outputs"][0]["as_tensor"]] * 2}

    def return_lists_inside(program, _):
        for node in program["graph_module"]["graph"]["nodes"]:
            if node["target"].endswith("while_loop"):
                node["inputs"][0]["arg"]["as_graph"]["graph"]["outputs"] = [{"as_tensors": []}]

    copy("refused_missing", "both_modes", lack)
    copy("refused_guarded", "both_modes", lack_and_guard)
    copy("refused_closed", "mlp", close)
    copy("refused_list", "mlp", return_list)
    copy("refused_nested_list", "loops", return_lists_inside)
    to_train = {"model.json": "train.json", "model_": "train_"}
    copy("refused_nameless", "both_modes", lambda *_: None, to_train)
