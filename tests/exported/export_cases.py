"""Exports small models and writes what Python makes of them.

Usage: export_cases.py FOLDER

For each case NAME it writes NAME.pt2 and NAME.ref: torch.save of a dictionary
with the inputs, the results, the loss and every gradient of one step in float32,
and the buffers after it. For each case of STEPS it writes NAME_steps.pt2, in
double, and NAME_steps.ref: the losses of five steps of AdamW and the parameters
after them. Does nothing if the folder is of this script and this version of
Python.
"""

import hashlib
import json
import operator
import pathlib
import sys
import zipfile

FOLDER = pathlib.Path(sys.argv[1])
PYTHON = pathlib.Path(__file__).parents[2] / "python"
HERE = pathlib.Path(__file__)
SOURCES = [HERE, HERE.with_name("fold_cases.py"), HERE.with_name("state_cases.py"), PYTHON / "tessera_export.py"]
STAMP = hashlib.sha256(b"".join(each.read_bytes() for each in SOURCES) + sys.version.encode()).hexdigest()
if (FOLDER / "stamp").exists() and (FOLDER / "stamp").read_text() == STAMP:
    sys.exit(0)

sys.path.append(str(PYTHON))

import fold_cases  # noqa: E402
import state_cases  # noqa: E402
import tessera_export  # noqa: E402
import torch  # noqa: E402: a run with nothing to do takes no time
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.export import Dim  # noqa: E402

torch.set_num_threads(1)


class Mlp(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(6, 16), nn.Linear(16, 4), nn.Dropout(p)

    def forward(self, x):
        return self.fc2(self.drop(F.gelu(self.fc1(x))))


class RotaryBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    @staticmethod
    def rotate(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Rotary(nn.Module):
    """A decoder in the manner of Llama: tied embeddings, rotary positions."""

    def __init__(self, vocabulary=32, width=16, heads=2, layers=2, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(RotaryBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        half = width // heads // 2
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(half) / half), persistent=False)

    def forward(self, ids):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angle = torch.arange(ids.shape[1], device=ids.device)[:, None].float() * self.inverse.float()
            angle = torch.cat((angle, angle), dim=-1)
            cos, sin = angle.cos(), angle.sin()
        x = self.drop(self.embed(ids))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, image):
        x = F.relu(self.bn1(self.conv1(image)))
        x = F.relu(x + self.bn2(self.conv2(x)))
        return self.fc(F.adaptive_avg_pool2d(F.max_pool2d(x, 2), 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(12, 6), kind(6, 8, 2, batch_first=True), nn.Linear(8, 12)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, threshold):
        return torch.cond(x.sum() > threshold, lambda y: self.left(y).sin(), lambda y: self.right(y).cos(), (x,))


class Loops(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, start, rows):
        from torch._higher_order_ops import scan, while_loop
        from torch._higher_order_ops.map import map

        def step(carried, row):
            after = torch.tanh(self.cell(carried) + row)
            return after, after * 2

        last, all_rows = scan(step, start, rows)
        all_rows = map(lambda row, bias: self.cell(row) + bias, all_rows, last)
        begin = (torch.tensor(0), last.detach())  # an export loses a torch.no_grad() around a loop
        count, grown = while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x * 1.5), begin)
        return last, all_rows, count, grown


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc1(x)
            with torch.autocast("cpu", enabled=False):
                y = self.fc2(y.float())
        return y


class Forms(nn.Module):
    """Takes and returns what Python can: dictionaries, tuples, None, numbers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, pair, skip=None, *, options, scale: float = 2.0, flag: bool = True, name="sum"):
        y = self.fc(x) * scale + pair[0]
        y = y if skip is None else y + skip
        y = y + options["bias"]["inner"][0] if flag else y
        mask = pair[1] & (y > 0)
        total = y.sum(-1) if name == "sum" else y.mean(-1)
        return {"y": y, "parts": (mask, [total, None]), "scale": scale, "name": name, "rows": x.shape[0]}


class Symbolic(nn.Module):
    """Arithmetic of sizes, and an int that the caller chooses."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, doubled, count):
        n = x.shape[0]
        y = self.fc(x)
        half = y * (n // 2) * (n / 4) - (n % 3) + torch.sym_min(n, 5) + torch.sym_max(n - 7, -2)
        table = torch.arange(-n, n * n - n, n + 1, dtype=y.dtype).sum()
        return half, doubled[: 2 * n - 1].sum() + table, y.sum() * count, -(n + 1) // 2, count * n


class Chosen(nn.Module):
    """A size that depends on values, with assertions."""

    def forward(self, x, length):
        n = length.item()
        torch._check(n >= 1)
        torch._check(n <= x.shape[0])
        return x[:n].sum(0), torch.nonzero(x > 0).shape[0]


class Buffers(nn.Module):
    """Buffers that forward() changes, through views too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, 3))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("offset", torch.arange(3.0), persistent=False)
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        self.seen[1:3] = x.detach().mean(0)
        self.seen.add_(1)
        self.steps += 1
        return self.fc(x + self.offset) * self.seen[2] + self.steps


class Views(nn.Module):
    """Weights that are views, not contiguous and with an offset; lists, in-place operators, constants."""

    def __init__(self):
        super().__init__()
        base = torch.randn(5, 6)
        self.across = nn.Parameter(base.t())
        self.part = nn.Parameter(torch.randn(40)[4:24].view(4, 5)[1:])
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("index", torch.tensor([2, 0, 1]))

    def forward(self, x):
        a, b = (x @ self.across).relu_().split([2, 3], dim=1)
        y = torch.cat((b, a), dim=1) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) + self.frozen
        y = y[:, None] + self.part[self.index]
        y = torch.where(y > 0, y, float("-inf")).softmax(-1) + y.clamp(max=float("inf"))
        return torch.stack([y[:, 0], y[:, 2]]).transpose(0, 1).contiguous()


class Even(nn.Module):
    """Its guards say more than its shapes do."""

    def forward(self, x, y):
        n = x.shape[0]
        torch._check(n % 2 == 0)
        return x.reshape(n // 2, 2, -1).sum(1) * y.shape[0] + y[: n // 2, None]


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x += 1
        return self.fc(x)


class InputChanged(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, state):
        y = self.fc(x) + state
        state[1:].mul_(2).add_(x.mean())
        return y


class Chain(nn.Module):
    def forward(self, x):
        for _ in range(8):
            x = x * 2
        return x


class Interleaved(nn.Module):
    """A module that changes a value of its parent: it cannot be recomputed."""

    def __init__(self):
        super().__init__()
        self.fc, self.outer = nn.Linear(4, 4), InPlace()

    def forward(self, x):
        return self.outer(self.fc(x))


class HiddenInPlace(nn.Module):
    """Changes its argument, too: a dropout that drops nothing returns what it was given."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = F.dropout(x, 0.0)
        x += 1
        return self.fc(x)


class InterleavedHidden(Interleaved):
    def __init__(self):
        super().__init__()
        self.outer = HiddenInPlace()


def dims(*names):
    return [Dim(name, min=2, max=16) for name in names]


def cases():
    """(name, model, args, kwargs, dynamic shapes, whether to decompose)"""
    batch, length = dims("batch", "length")
    ids = torch.randint(0, 32, (3, 7))
    tokens = torch.randint(0, 12, (3, 7))
    image = torch.randn(4, 3, 8, 8)
    dynamic = ({0: batch, 1: length},)
    forms = (
        (torch.randn(4, 3), (torch.randn(3), torch.rand(4, 3) > 0.5)),
        {"options": {"bias": {"inner": [torch.ones(3)]}}, "scale": 2.5, "flag": True, "name": "sum"},
    )
    yield "mlp", Mlp(0.0), (torch.randn(5, 6),), {}, None, False
    yield "dropout", Mlp(0.5), (torch.randn(5, 6),), {}, None, False
    yield "rotary", Rotary(), (ids,), {}, None, False
    yield "rotary_dynamic", Rotary(), (ids,), {}, dynamic, False
    yield "rotary_decomposed", Rotary(), (ids,), {}, dynamic, True
    yield "conv", ConvNet(), (image,), {}, ({0: batch},), False
    yield "conv_decomposed", ConvNet(), (image,), {}, ({0: batch},), True
    yield "lstm", Recurrent(nn.LSTM), (tokens,), {}, None, False
    yield "gru", Recurrent(nn.GRU), (tokens,), {}, None, False
    yield "cond_left", Branches(), (torch.randn(3, 4), torch.tensor(-100.0)), {}, None, False
    yield "cond_right", Branches(), (torch.randn(3, 4), torch.tensor(100.0)), {}, None, False
    yield "loops", Loops(), (torch.randn(2, 4), torch.randn(5, 2, 4)), {}, None, False
    yield "autocast", Autocast(), (torch.randn(3, 8),), {}, None, False
    yield "forms", Forms(), *forms, None, False
    shapes = {"x": {0: batch}, "doubled": {0: 2 * batch}, "count": Dim.DYNAMIC}
    yield "symbolic", Symbolic(), (torch.randn(6, 4), torch.randn(12, 2), 3), {}, shapes, False
    yield "chosen", Chosen(), (torch.randn(5, 3), torch.tensor(3)), {}, ({0: batch}, None), False
    yield "buffers", Buffers(), (torch.randn(5, 3),), {}, None, False
    yield "buffers_decomposed", Buffers(), (torch.randn(5, 3),), {}, None, True
    auto = ({0: Dim.AUTO}, {0: Dim.AUTO})
    yield "even", Even(), (torch.randn(8, 3), torch.randn(9)), {}, auto, False
    for decompose in (False, True):
        name = "input_changed_decomposed" if decompose else "input_changed"
        yield name, InputChanged(), (torch.randn(3, 4), torch.randn(3, 4)), {}, None, decompose
    yield "chain", Chain(), (torch.randn(1 << 20),), {}, None, False
    yield "interleaved", Interleaved(), (torch.randn(3, 4),), {}, None, False
    yield "interleaved_hidden", InterleavedHidden(), (torch.randn(3, 4),), {}, None, False
    yield "views", Views(), (torch.randn(4, 6),), {}, None, False
    yield from fold_cases.cases()
    yield from state_cases.cases()


def leaves(value):
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, (tuple, list)):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]


def loss_of(result):
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            total = total + leaf.double().square().mean()
    return total


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(clone(each) for each in value)
    return value


def export(model, args, kwargs, shapes, decompose, path):
    program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    torch.export.save(program.run_decompositions() if decompose else program, path)
    return program


def num_nodes(module):
    """The operators of a graph and of those inside of it; a file has no nodes that take a list apart."""
    graphs = [each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    return sum(node.target is not operator.getitem for node in nodes)


def grads_of(original, model):
    """Gradients by the names of `original`; a loaded program has a parameter for each name of a tied one."""
    result = {}
    for key, parameter in original.named_parameters():
        names = [name for name, each in original.named_parameters(remove_duplicate=False) if each is parameter]
        grads = {id(g): g for g in (model.get_parameter(name).grad for name in names) if g is not None}
        if grads:
            result[key] = sum(grads.values())
    return result


def write_case(name, model, args, kwargs, shapes, decompose):
    model.train()
    program = export(model, args, kwargs, shapes, decompose, FOLDER / f"{name}.pt2")
    before = clone(dict(model.state_dict()))
    original = model
    if name == "rotary_decomposed":  # other kernels than those of the model itself
        model = torch.export.load(FOLDER / f"{name}.pt2").module()
    torch.manual_seed(11)
    given = clone(list(args))
    result = model(*given, **clone(kwargs))
    loss = loss_of(result)
    if loss.requires_grad:
        loss.backward()
    reference = {
        "args": clone(list(args)),
        "args_after": given,
        "kwargs": clone(kwargs),
        "leaves": [clone(leaf) for leaf in leaves(result)],
        "loss": loss.detach(),
        "nodes": num_nodes(program.graph_module),
        "names": [key for key, _ in model.named_parameters(remove_duplicate=False)],
        "grads": grads_of(original, model),
        "before": before,
        "after": dict(model.state_dict()),
    }
    torch.save(reference, FOLDER / f"{name}.ref")
    print(name, flush=True)


def steps():
    batch, length = dims("batch", "length")
    yield "rotary", Rotary(width=16, layers=3), (torch.randint(0, 32, (4, 6)),), ({0: batch, 1: length},), False
    yield "conv", ConvNet(), (torch.randn(4, 3, 8, 8),), ({0: batch},), False
    yield "lstm", Recurrent(nn.LSTM), (torch.randint(0, 12, (4, 5)),), None, False
    yield "mlp", Mlp(0.0), (torch.randn(8, 6),), None, False
    yield "again", state_cases.Again(), (torch.randn(8, 4),), None, False


def write_steps(name, model, args, shapes, decompose):
    model = model.double().train()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    export(model, args, {}, shapes, decompose, FOLDER / f"{name}_steps.pt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(5):
        loss = loss_of(model(*args))
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(
        {"args": list(args), "losses": torch.stack(losses), "after": dict(model.state_dict())},
        FOLDER / f"{name}_steps.ref",
    )
    print(name, "steps", flush=True)


def export_both_modes(name, model, x):
    """One archive with a program for training and one for evaluation."""
    from torch.export.pt2_archive._package import package_pt2

    programs = {
        "model": torch.export.export(model.train(), (x,), strict=False),
        "eval": torch.export.export(model.eval(), (x,), strict=False),
    }
    package_pt2(FOLDER / "twice.pt2", exported_programs=programs)
    # package_pt2 writes the weights of each program; here both read those of the first.
    with zipfile.ZipFile(FOLDER / "twice.pt2") as twice, zipfile.ZipFile(FOLDER / f"{name}.pt2", "w") as once:
        for entry in twice.infolist():
            if not entry.filename.endswith(("eval_weights_config.json", "eval_constants_config.json")):
                once.writestr(entry.filename.replace("twice/", f"{name}/", 1), twice.read(entry))


def write_both_modes():
    model, x = Mlp(0.5), torch.randn(5, 6)
    export_both_modes("both_modes", model, x)
    torch.manual_seed(11)
    result = {"args": [x], "eval": model.eval()(x).detach(), "train": model.train()(x).detach()}
    torch.save(result, FOLDER / "both_modes.ref")


def change_program(name, change):
    """Changes the nodes in the file of a case."""
    path, old = FOLDER / f"{name}.pt2", FOLDER / f"{name}.old"
    path.rename(old)
    with zipfile.ZipFile(old) as before, zipfile.ZipFile(path, "w") as after:
        for entry in before.infolist():
            data = before.read(entry)
            if entry.filename.endswith("models/model.json"):
                program = json.loads(data)
                change(program["graph_module"]["graph"]["nodes"])
                data = json.dumps(program)
            after.writestr(entry.filename, data)
    old.unlink()


class Tied(nn.Module):
    """Three weights of one shape, two of which are one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.other(self.first(x)))


def write_missing():
    """Archives without weights: that of tessera_export.py has a payload for each, that of torch one for all."""
    x = torch.randn(2, 4)
    with tessera_export.without_weights():
        model = Tied()
    tessera_export.export(model, (x,), path=FOLDER / "missing.pt2")
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        program = torch.export.export(Tied(), (x,), strict=False)
    program._example_inputs = None
    torch.export.save(program, FOLDER / "missing_of_torch.pt2")


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory that autograd keeps for backward, without that of `others`."""

    def __init__(self, others):
        self.storages = {}
        known = {tensor.untyped_storage()._cdata for tensor in others}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                self.storages[storage._cdata] = storage
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    def total(self):
        return sum(storage.nbytes() for storage in self.storages.values())


def write_bfloat16():
    """A model in bfloat16, to be computed from float32 shards."""
    model = Rotary().to(torch.bfloat16).train()
    ids = torch.randint(0, 32, (3, 7))
    export(model, (ids,), {}, None, False, FOLDER / "bfloat16.pt2")
    saved = SavedBytes([*model.parameters(), *model.buffers(), ids])
    with saved:
        result = model(ids)
    loss = loss_of(result)
    loss.backward()
    reference = {
        "args": [ids],
        "leaves": [result.detach()],
        "loss": loss.detach(),
        "grads": grads_of(model, model),
        "saved_bytes": saved.total(),
    }
    torch.save(reference, FOLDER / "bfloat16.ref")


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for case in cases():
        write_case(*case)
    for case in steps():
        write_steps(*case)
    for name, change in fold_cases.changes():
        change_program(name, change)
    state_cases.write_guarded(FOLDER)
    write_both_modes()
    state_cases.write_changed(FOLDER)
    export_both_modes("phases", fold_cases.Phases(), torch.randn(3))
    write_missing()
    write_bfloat16()
    (FOLDER / "stamp").write_text(STAMP)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
