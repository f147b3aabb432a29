#!/usr/bin/env python3
"""Writes goldens.txt: Python's optimizers over 100 steps, for golden_test.cpp.

    python3 tests/optim/goldens.py        # with torch; writes beside itself

A case is a few lines: its name and dtype, the keys of its param group, and after
the last step the parameters and their state. Inputs are exact in binary, so that
both sides start from the same bits; golden_test.cpp makes the same ones.
"""

import itertools
import pathlib

import torch

STEPS = 100
SHAPES = [(3, 4), (5,)]

# Every option that changes the arithmetic, alone and together with the others.
CASES = {
    "SGD": {
        "plain": dict(lr=0.05),
        "momentum": dict(lr=0.05, momentum=0.9),
        "dampening": dict(lr=0.05, momentum=0.9, dampening=0.25),
        "nesterov": dict(lr=0.05, momentum=0.9, nesterov=True),
        "weight_decay": dict(lr=0.05, weight_decay=0.1),
        "maximize": dict(lr=0.01, maximize=True),
        "all": dict(lr=0.01, momentum=0.5, dampening=0.25, weight_decay=0.1, maximize=True),
        "all_nesterov": dict(lr=0.01, momentum=0.5, nesterov=True, weight_decay=0.1, maximize=True),
    },
    "Adam": {
        "plain": {},
        "lr": dict(lr=0.05),
        "betas": dict(lr=0.05, betas=(0.5, 0.75)),
        "eps": dict(lr=0.05, eps=0.1),
        "weight_decay": dict(lr=0.05, weight_decay=0.1),
        "amsgrad": dict(lr=0.05, amsgrad=True),
        "maximize": dict(lr=0.05, maximize=True),
        "decoupled": dict(lr=0.05, weight_decay=0.1, decoupled_weight_decay=True),
        "all": dict(lr=0.05, betas=(0.5, 0.75), eps=0.1, weight_decay=0.1, amsgrad=True, maximize=True),
    },
    "AdamW": {
        "plain": {},
        "lr": dict(lr=0.05),
        "betas": dict(lr=0.05, betas=(0.5, 0.75)),
        "eps": dict(lr=0.05, eps=0.1),
        "weight_decay": dict(lr=0.05, weight_decay=0.5),
        "amsgrad": dict(lr=0.05, amsgrad=True),
        "maximize": dict(lr=0.05, maximize=True),
        "all": dict(lr=0.05, betas=(0.5, 0.75), eps=0.1, weight_decay=0.5, amsgrad=True, maximize=True),
    },
    "Adagrad": {
        "plain": {},
        "lr": dict(lr=0.5),
        "lr_decay": dict(lr=0.5, lr_decay=0.1),
        "eps": dict(lr=0.5, eps=0.1),
        "weight_decay": dict(lr=0.5, weight_decay=0.1),
        "initial_accumulator_value": dict(lr=0.5, initial_accumulator_value=2.0),
        "maximize": dict(lr=0.5, maximize=True),
        "all": dict(
            lr=0.5, lr_decay=0.1, eps=0.1, weight_decay=0.1, initial_accumulator_value=2.0, maximize=True
        ),
    },
    "RMSprop": {
        "plain": {},
        "lr": dict(lr=0.05),
        "alpha": dict(lr=0.05, alpha=0.75),
        "eps": dict(lr=0.05, eps=0.1),
        "momentum": dict(lr=0.05, momentum=0.5),
        "centered": dict(lr=0.05, centered=True),
        "weight_decay": dict(lr=0.05, weight_decay=0.1),
        "maximize": dict(lr=0.05, maximize=True),
        "all": dict(
            lr=0.05, alpha=0.75, eps=0.1, momentum=0.5, centered=True, weight_decay=0.1, maximize=True
        ),
    },
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "complex128": torch.complex128}


def real_parts(shape, first):
    """((7 i + first) mod 11 - 5) / 4 for element i."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel, dtype=torch.float64) * 7 + first) % 11 - 5).reshape(shape) / 4


def numbers(shape, first, dtype):
    values = real_parts(shape, first)
    return torch.complex(values, real_parts(shape, first + 1)) if dtype.is_complex else values.to(dtype)


def train(optimizer_class, options, dtype):
    params = [torch.nn.Parameter(numbers(shape, 3, dtype)) for shape in SHAPES]
    optimizer = optimizer_class(params, **options)
    for step in range(STEPS):
        for param in params:
            # The second parameter misses some steps.
            misses = param is params[1] and step % 7 == 0
            param.grad = None if misses else (numbers(param.shape, step, dtype) + param.detach()) / 4
        optimizer.step()
    return params, optimizer


def word(value):
    """A letter for the kind, and the value."""
    if value is None:
        return "n"
    if isinstance(value, bool):
        return f"b {int(value)}"
    if isinstance(value, tuple):
        return "l " + " ".join(repr(float(v)) for v in value)
    return f"d {float(value)!r}"


def digits(tensor):
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return " ".join(repr(v) for v in flat.detach().double().flatten().tolist())


def lines():
    yield f"# Written by goldens.py with torch {torch.__version__.split('+')[0]}."
    for (name, cases), (dtype_name, dtype) in itertools.product(CASES.items(), DTYPES.items()):
        for case, options in cases.items():
            if dtype.is_complex and not case.startswith("all"):
                continue
            params, optimizer = train(getattr(torch.optim, name), options, dtype)
            dictionary = optimizer.state_dict()
            yield f"case {name} {case} {dtype_name}"
            for key, value in dictionary["param_groups"][0].items():
                if key != "params":
                    yield f"group {key} {word(value)}"
            for i, param in enumerate(params):
                yield f"param {i} {digits(param)}"
                for key, value in dictionary["state"].get(i, {}).items():
                    yield f"state {i} {key} {digits(value)}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = pathlib.Path(__file__).with_name("goldens.txt")
    target.write_text("\n".join(lines()) + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")
