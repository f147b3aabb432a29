"""Models for what load_exported() computes once, and for what it must not; see fold_constants.h."""

import torch
from torch import nn


class Folded(nn.Module):
    """Position ids, a causal mask and a tensor that is written out: all of them constants."""

    def __init__(self):
        super().__init__()
        self.places, self.fc = nn.Embedding(6, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.places(torch.arange(6).flip(0))
        scores = x @ x.transpose(-1, -2) + torch.full((6, 6), float("-inf")).triu(1)
        with torch.no_grad():
            scale = (torch.arange(8, dtype=torch.float32) + 1).log()
        return self.fc(scores.softmax(-1) @ x) * scale * torch.tensor([1.0, -1.0] * 4)


class Written(nn.Module):
    """A constant that a view of it writes to."""

    def forward(self, x):
        sums = torch.zeros(2, 3)
        sums.view(6)[1:4].add_(x)
        return sums * 2


class WrittenTensor(nn.Module):
    """A tensor that is part of the program, written to through what hides that it is a view."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(3.0)  # no buffer: a constant of the program

    def forward(self, x):
        return torch.nn.functional.dropout(self.table.expand(2, 3).clone(), 0.0, False).mul_(x) + self.table.neg()


class NestedWritten(nn.Module):
    """A constant that a graph under no_grad writes to, itself or through what hides that it is the constant."""

    def __init__(self, hide):
        super().__init__()
        self.hide = hide

    def forward(self, x):
        sums = torch.zeros(3)
        with torch.no_grad():
            self.hide(sums, x).add_(x)
        return sums * 2


class TwoNames(nn.Module):
    """A tensor that is part of the program under three names, and written to under one."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(3.0)
        self.same, self.part = self.table.view(3), self.table[1:]

    def forward(self, x):
        self.table.copy_(x)
        return self.same.neg() + self.part.exp().sum()


class Phases(nn.Module):
    """A tensor that is part of both programs: training writes to it, evaluation reads it."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(3.0)

    def forward(self, x):
        if self.training:
            self.table.copy_(x)
            return x * 2
        return x + self.table.neg()


class Returned(nn.Module):
    """Constants that the caller gets, and may write to."""

    def forward(self, x):
        ones = torch.ones(3)
        return x + 1, ones, torch.arange(6).view(2, 3)[1]


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand(3) + torch.zeros(3).bernoulli(0.5)


class Unfilled(nn.Module):
    """Memory that has no values."""

    def forward(self, x):
        return torch.where(x == x, x, torch.empty(3))


class Derived(nn.Module):
    """Values of parameters and buffers, which may change."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(3))

    def forward(self, x):
        return x * self.weight.exp() + self.offset.exp()


class Large(nn.Module):
    """Two tensors of 4 MB, which the program does not have to hold."""

    def forward(self, x):
        return x + torch.arange(1 << 20, dtype=torch.float32).neg().sum()


class Many(nn.Module):
    """Sixty tensors of 400 kB."""

    def forward(self, x):
        for i in range(60):
            x = x + torch.full((100_000,), float(i)).sum()
        return x


class Expanded(nn.Module):
    """One element that reads as 256 MB."""

    def forward(self, x):
        return x + torch.tensor(2.0).expand(64, 1 << 20)[0, 0]


class Understated(nn.Module):
    """Its file says that the tensor has 7 elements; see changes()."""

    def forward(self, x):
        return x + torch.full((7,), 2.0).mean()


class Conjugated(nn.Module):
    """Constants that are conjugated and negated by a mark alone."""

    def forward(self, x):
        table = torch.complex(torch.arange(3.0), torch.ones(3))
        return (x * table.conj()).real, x * table.conj().imag


class Sparse(nn.Module):
    def forward(self, x):
        return torch.sparse.mm(torch.eye(3).to_sparse(), x[:, None]) * 2


class Places(nn.Module):
    """A module with constants alone."""

    def forward(self):
        return torch.arange(3.0).log1p()


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.places = nn.Linear(3, 3), Places()

    def forward(self, x):
        return self.fc(x) + self.places()


class Products(nn.Module):
    """Autocast, which the caller may switch on, makes another value of a product, but not of a sum."""

    def forward(self, x):
        table = torch.arange(9.0).view(3, 3) / 7
        return x + table @ table, x + (table + table)


class Guarded(nn.Module):
    """The same inside of a region with autocast."""

    def forward(self, x):
        table = torch.arange(9.0).view(3, 3) / 7
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.mm(table, table).float() + x
        return y + table.neg()


class HalfProducts(nn.Module):
    """A product in bfloat16, of which autocast to bfloat16 makes the same value and autocast to float16 another."""

    def forward(self, x):
        table = (torch.arange(9.0).view(3, 3) / 7).to(torch.bfloat16)
        return x + table @ table


class CallersDtype(nn.Module):
    """Autocast whose dtype is the caller's; see changes()."""

    def forward(self, x):
        table = torch.arange(9.0).view(3, 3) / 7
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.mm(table, table)
        return x + y


def changes():
    """What is changed in the files of cases: (name, a function of the nodes of the program)."""

    def understate(nodes):
        full = next(node for node in nodes if node["target"] == "torch.ops.aten.full.default")
        full["inputs"][0]["arg"]["as_ints"] = [1 << 24]

    def forget_dtype(nodes):
        region = next(node for node in nodes if node["target"].endswith("wrap_with_autocast"))
        region["inputs"][1]["arg"] = {"as_none": True}

    yield "fold_understated", understate
    yield "fold_callers_dtype", forget_dtype


def cases():
    x = torch.randn(3)
    hidden = torch.nn.functional.dropout
    yield "fold_nested_written", NestedWritten(lambda sums, x: sums), (x,), {}, None, False
    yield "fold_nested_dropout", NestedWritten(lambda sums, x: hidden(sums, 0.0, False)), (x,), {}, None, False
    yield "fold_nested_type_as", NestedWritten(lambda sums, x: sums.type_as(x)), (x,), {}, None, False
    yield "fold_two_names", TwoNames(), (x,), {}, None, False
    yield "fold_expanded", Expanded(), (x,), {}, None, False
    yield "fold_understated", Understated(), (x,), {}, None, False
    yield "fold_conjugated", Conjugated(), (x,), {}, None, False
    yield "fold_sparse", Sparse(), (x,), {}, None, False
    yield "fold_module", Placed(), (x,), {}, None, False
    yield "fold_half_products", HalfProducts(), (torch.randn(3, 3),), {}, None, False
    yield "fold_callers_dtype", CallersDtype(), (torch.randn(3, 3),), {}, None, False
    yield "folded", Folded(), (torch.randn(2, 6, 8),), {}, None, False
    yield "fold_written", Written(), (x,), {}, None, False
    yield "fold_written_tensor", WrittenTensor(), (x,), {}, None, False
    yield "fold_returned", Returned(), (x,), {}, None, False
    yield "fold_random", Random(), (x,), {}, None, False
    yield "fold_unfilled", Unfilled(), (x,), {}, None, False
    yield "fold_derived", Derived(), (x,), {}, None, False
    yield "fold_large", Large(), (x,), {}, None, False
    yield "fold_many", Many(), (x,), {}, None, False
    yield "fold_products", Products(), (torch.randn(3, 3),), {}, None, False
    yield "fold_autocast", Guarded(), (torch.randn(3, 3),), {}, None, False
