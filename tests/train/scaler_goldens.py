#!/usr/bin/env python3
"""Writes scaler_goldens.txt: what Python's torch.amp.GradScaler does, for grad_scaler_test.cpp.

    python3 tests/train/scaler_goldens.py        # with torch; writes beside itself

A case is a line with its name and options, then a line for each iteration: for each of
two optimizers what its gradients are ("f" finite, "i" one infinity, "n" one NaN, "-" not
stepped), the scale that update() is given (or "-"), and afterwards the scale, the growth
tracker and the parameters. Gradients and learning rate are exact in binary, so that the
other side gets the same bits.
"""

import pathlib

import torch

CASES = {
    # name: (init_scale, growth_factor, backoff_factor, growth_interval), (iterations of A, of B)
    "defaults": ((65536.0, 2.0, 0.5, 2000), ("ffiffnffff", "----------")),
    "grows": ((1024.0, 2.0, 0.5, 3), ("fffffffiffffffffniifffffffffff", "-" * 30)),
    "odd_factors": ((1000.0, 1.7, 0.3, 2), ("fffffiffffnfffffffifffffffffff", "-" * 30)),
    "every_step": ((4.0, 3.0, 0.25, 1), ("ffiffniffff", "-----------")),
    "stays_finite": ((1e38, 2.0, 0.5, 1), ("ffffffiffff", "-----------")),
    "shrinks": ((1e-30, 2.0, 0.5, 4), ("iiiiiiiiiiiiiiiiiiiiiiiiffffff", "-" * 30)),
    "two_optimizers": ((512.0, 2.0, 0.5, 3), ("fifffffniffff", "ffffiff-iffff")),
}
# Iterations of "two_optimizers" at which update() is given a scale.
NEW_SCALES = {("two_optimizers", 10): 96.0, ("grows", 20): 7.0}
LR = 0.25
SIZE = 5


def gradient(iteration, which, kind, scale):
    """((7 i + iteration + which) mod 11 - 5) / 4 for element i, scaled."""
    values = ((torch.arange(SIZE, dtype=torch.float32) * 7 + iteration + which) % 11 - 5) / 4
    values = values * scale
    if kind != "f":
        values[iteration % SIZE] = float("inf") if kind == "i" else float("nan")
    return values


def run(name, options, kinds):
    init_scale, growth_factor, backoff_factor, growth_interval = options
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=init_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
    )
    params = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in kinds]
    optimizers = [torch.optim.SGD([param], lr=LR) for param in params]
    for iteration, now in enumerate(zip(*kinds)):
        scaler.scale(torch.ones(()))
        for which, kind in enumerate(now):
            if kind != "-":
                params[which].grad = gradient(iteration, which, kind, scaler.get_scale())
                scaler.step(optimizers[which])
        new_scale = NEW_SCALES.get((name, iteration))
        scaler.update(new_scale)
        state = scaler.state_dict()
        numbers = [value for param in params for value in param.detach().double().tolist()]
        yield " ".join(
            ["step", *now, "-" if new_scale is None else repr(new_scale), repr(state["scale"])]
            + [str(state["_growth_tracker"])]
            + [repr(number) for number in numbers]
        )


def lines():
    yield f"# Written by scaler_goldens.py with torch {torch.__version__.split('+')[0]}."
    for name, (options, kinds) in CASES.items():
        yield "case " + name + " " + " ".join(repr(option) for option in options)
        yield from run(name, options, kinds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = pathlib.Path(__file__).with_name("scaler_goldens.txt")
    target.write_text("\n".join(lines()) + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")
