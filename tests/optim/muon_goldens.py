#!/usr/bin/env python3
"""Writes muon_goldens.txt: Python's Muon over 10 steps, for muon_golden_test.cpp.

    python3 tests/optim/muon_goldens.py [FILE]     # with torch; by default beside itself

First the products of bfloat16 matrices that the steps are made of, so that the test
can tell whether its processor rounds them as this one. Then the cases: the keys of
the param group, and after the last step the parameters and their state. Inputs are
exact in binary; muon_golden_test.cpp makes the same ones. Last the losses of a small
network, for a sharded one in C++.
"""

import pathlib
import sys

import torch

STEPS = 10
# Tall, wide and square; with and without tails behind whole vector registers.
SHAPES = [(12, 5), (5, 12), (7, 7), (19, 8), (8, 17)]

# Every option that changes the arithmetic, alone and together with the others.
CASES = {
    "plain": {},
    "lr": dict(lr=0.02),
    "no_nesterov": dict(lr=0.02, nesterov=False),
    "momentum": dict(lr=0.02, momentum=0.5),
    "no_momentum": dict(lr=0.02, momentum=0.0),
    "weight_decay": dict(lr=0.02, weight_decay=0.5),
    "original": dict(lr=0.02, adjust_lr_fn="original"),
    "match_rms_adamw": dict(lr=0.02, adjust_lr_fn="match_rms_adamw"),
    "ns_coefficients": dict(lr=0.02, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=7),
    "eps": dict(lr=0.02, eps=100.0),
    "all": dict(
        lr=0.02,
        weight_decay=0.5,
        momentum=0.75,
        nesterov=False,
        ns_coefficients=(2.0, -1.5, 0.5),
        eps=2.0,
        ns_steps=3,
        adjust_lr_fn="match_rms_adamw",
    ),
}


def numbers(shape, first):
    """((7 i^2 + 3 i + first) mod 61 - 30) / 16 for element i."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((7 * i * i + 3 * i + first) % 61 - 30).reshape(shape) / 16).float()


def products(shape):
    x = numbers(shape, 1).bfloat16() / 16
    x = x.T if shape[0] > shape[1] else x
    gram = x @ x.T
    update = torch.addmm(gram, gram, gram, beta=-1.5, alpha=0.5)
    return torch.cat([t.flatten() for t in (gram, update, torch.addmm(x, update, x, beta=2.0))])


def train(options):
    params = [torch.nn.Parameter(numbers(shape, 3)) for shape in SHAPES]
    optimizer = torch.optim.Muon(params, **options)
    for step in range(STEPS):
        for param in params:
            # The second parameter misses some steps.
            misses = param is params[1] and step % 4 == 0
            param.grad = None if misses else numbers(param.shape, 5 * step) + param.detach() / 4
        optimizer.step()
    return params, optimizer


def word(value):
    """A letter for the kind, and the value."""
    if value is None:
        return "n"
    if isinstance(value, bool):
        return f"b {int(value)}"
    if isinstance(value, int):
        return f"i {value}"
    if isinstance(value, str):
        return f"s {value}"
    if isinstance(value, tuple):
        return "l " + " ".join(repr(float(v)) for v in value)
    return f"d {value!r}"


def bits(tensor):
    """Of float32, in hexadecimal."""
    words = tensor.detach().float().contiguous().view(torch.int32).flatten().tolist()
    return " ".join(f"{word & 0xFFFFFFFF:08x}" for word in words)


def losses():
    first = torch.nn.Parameter(numbers((16, 12), 2) / 8)
    second = torch.nn.Parameter(numbers((7, 16), 4) / 8)
    optimizer = torch.optim.Muon([first, second], lr=0.02)
    values = []
    for _ in range(2 * STEPS):
        optimizer.zero_grad()
        hidden = torch.tanh(torch.nn.functional.linear(numbers((10, 12), 6), first))
        loss = torch.nn.functional.linear(hidden, second).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    return torch.stack(values)


def lines():
    yield f"# Written by muon_goldens.py with torch {torch.__version__.split('+')[0]}."
    for i, shape in enumerate(SHAPES):
        yield f"products {i} {bits(products(shape))}"
    for case, options in CASES.items():
        params, optimizer = train(options)
        dictionary = optimizer.state_dict()
        yield f"case {case}"
        for key, value in dictionary["param_groups"][0].items():
            if key != "params":
                yield f"group {key} {word(value)}"
        for i, param in enumerate(params):
            yield f"param {i} {bits(param)}"
            for key, value in dictionary["state"].get(i, {}).items():
                yield f"state {i} {key} {bits(value)}"
    yield f"losses {bits(losses())}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    beside = pathlib.Path(__file__).with_name("muon_goldens.txt")
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else beside
    target.write_text("\n".join(lines()) + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")
