#!/usr/bin/env python3
"""Writes lr_goldens.json: Python's learning-rate schedules, for lr_scheduler_golden_test.cpp.

    python3 tests/optim/lr_goldens.py        # with torch; writes beside itself

A case has how the schedule is made, the learning rates (and momenta, if they are
scheduled) after each step, and half way the schedule's dictionary and the numbers of
the param groups. JSON has neither infinities nor numbers as keys: {"float": "inf"}
and {"items": [[3, 2]]} stand for these.
"""

import json
import math
import pathlib
import warnings

import torch
from torch.optim import lr_scheduler

LAMBDAS = {"power": lambda epoch: 0.95**epoch, "inverse": lambda epoch: 1 / (1 + 0.05 * epoch)}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, dict(momentum=0.9)),
    "AdamW": (torch.optim.AdamW, {}),
    "RMSprop": (torch.optim.RMSprop, dict(momentum=0.5)),
}


def case(kind, name="plain", steps=200, optimizer="SGD", lrs=(0.1,), last=None, epochs=None, parts=None, **args):
    """`last`: learning rates at which a run is resumed; `epochs`: what step() is given."""
    return dict(
        kind=kind, name=name, steps=len(epochs) if epochs else steps, optimizer=optimizer, lrs=list(lrs),
        last=last, epochs=epochs, parts=parts, args=args,
    )


def part(kind, **args):
    return dict(kind=kind, args=args)


WARMUP = part("LinearLR", start_factor=0.01, total_iters=20)
TWO = (0.1, 0.003)

CASES = [
    case("LambdaLR", lr_lambda="power"),
    case("LambdaLR", "two", lrs=TWO, lr_lambda=["power", "inverse"]),
    case("LambdaLR", "resumed", last=[0.05], lr_lambda="inverse", last_epoch=17),
    case("MultiplicativeLR", lr_lambda="inverse", steps=60),
    case("MultiplicativeLR", "two", lrs=TWO, lr_lambda=["inverse", "power"], steps=30),
    case("StepLR", step_size=30),
    case("StepLR", "one", step_size=1, gamma=0.97, lrs=TWO),
    case("StepLR", "resumed", last=[0.0125], step_size=7, gamma=0.5, last_epoch=20),
    case("MultiStepLR", milestones=[30, 80, 120]),
    case("MultiStepLR", "repeated", milestones=[50, 10, 50, 50, 90], gamma=0.7, lrs=TWO),
    case("MultiStepLR", "none", milestones=[], steps=20),
    case("MultiStepLR", "zero", milestones=[0, 5], gamma=0.3, steps=20),
    case("ConstantLR", steps=20),
    case("ConstantLR", "zero", total_iters=0, factor=0.25, steps=20),
    case("ConstantLR", "one", total_iters=1, factor=0.7, lrs=TWO, steps=20),
    case("ConstantLR", "resumed", last=[0.07], total_iters=40, factor=0.7, last_epoch=30, steps=50),
    case("LinearLR", steps=20),
    case("LinearLR", "long", start_factor=1e-3, total_iters=150, lrs=TWO),
    case("LinearLR", "zero", total_iters=0, start_factor=0.5, steps=20),
    case("LinearLR", "one", total_iters=1, start_factor=0.5, end_factor=0.9, steps=20),
    case("LinearLR", "down", total_iters=100, start_factor=1.0, end_factor=0.0),
    case("LinearLR", "resumed", last=[0.04], total_iters=100, start_factor=0.1, last_epoch=33),
    case("ExponentialLR", gamma=0.98),
    case("ExponentialLR", "resumed", last=[0.01], gamma=0.9, last_epoch=10, lrs=(0.1,), steps=50),
    case("PolynomialLR", steps=20),
    case("PolynomialLR", "long", total_iters=150, power=0.9, lrs=TWO),
    case("PolynomialLR", "square", total_iters=100, power=2.0),
    case("PolynomialLR", "zero", total_iters=0, steps=20),
    case("PolynomialLR", "one", total_iters=1, power=3.0, steps=20),
    case("CosineAnnealingLR", T_max=200, steps=250),
    case("CosineAnnealingLR", "again", T_max=30, eta_min=1e-4, lrs=TWO, steps=300),
    case("CosineAnnealingLR", "one", T_max=1, eta_min=0.01, steps=20),
    case("CosineAnnealingLR", "resumed", last=[0.08], T_max=100, eta_min=0.001, last_epoch=30, steps=150),
    case("CosineAnnealingWarmRestarts", T_0=50, steps=250),
    case("CosineAnnealingWarmRestarts", "twice", T_0=10, T_mult=2, eta_min=1e-3, lrs=TWO, steps=300),
    case("CosineAnnealingWarmRestarts", "one", T_0=1, T_mult=3, steps=100),
    case("CosineAnnealingWarmRestarts", "resumed", last=[0.05], T_0=10, T_mult=2, last_epoch=7, steps=100),
    case("CosineAnnealingWarmRestarts", "epochs", T_0=10, T_mult=2, epochs=[i / 8 for i in range(400)]),
    case("CosineAnnealingWarmRestarts", "even_epochs", T_0=7, epochs=[i / 5 for i in range(200)]),
    case("OneCycleLR", max_lr=0.1, total_steps=200, steps=199),
    case("OneCycleLR", "AdamW", optimizer="AdamW", max_lr=[0.01, 0.03], lrs=(1e-3, 1e-3), epochs_=4,
         steps_per_epoch=50, anneal_strategy="linear", steps=199),
    case("OneCycleLR", "three", max_lr=0.4, total_steps=250, three_phase=True, pct_start=0.4, steps=249),
    case("OneCycleLR", "three_linear", optimizer="RMSprop", max_lr=0.4, total_steps=130, three_phase=True,
         anneal_strategy="linear", div_factor=10.0, final_div_factor=100.0, steps=130),
    case("OneCycleLR", "no_momentum", max_lr=0.1, total_steps=100, cycle_momentum=False, steps=99),
    case("OneCycleLR", "momenta", lrs=TWO, max_lr=0.1, total_steps=100, base_momentum=[0.5, 0.8],
         max_momentum=[0.7, 0.9], steps=99),
    case("SequentialLR", "warmup_cosine", steps=300, parts=[WARMUP, part("CosineAnnealingLR", T_max=280, eta_min=1e-4)],
         milestones=[20]),
    case("SequentialLR", "repeated", lrs=TWO, steps=60, milestones=[10, 10, 30],
         parts=[WARMUP, part("ExponentialLR", gamma=0.9), part("StepLR", step_size=4), part("PolynomialLR", total_iters=20)]),
    case("SequentialLR", "restarts", steps=120, milestones=[15, 60],
         parts=[part("ConstantLR", factor=0.1, total_iters=30), part("CosineAnnealingWarmRestarts", T_0=5, T_mult=2),
                part("MultiStepLR", milestones=[3, 3, 9], gamma=0.5)]),
    case("SequentialLR", "restarts_first", steps=60, milestones=[25],
         parts=[part("CosineAnnealingWarmRestarts", T_0=10), part("LinearLR", total_iters=10)]),
    case("SequentialLR", "at_zero", steps=20, milestones=[0],
         parts=[part("ConstantLR", factor=0.1), part("ExponentialLR", gamma=0.5)]),
    case("ChainedScheduler", "two", lrs=TWO, steps=100,
         parts=[part("ConstantLR", factor=0.1, total_iters=20), part("ExponentialLR", gamma=0.97)]),
    case("ChainedScheduler", "three", steps=100,
         parts=[WARMUP, part("MultiStepLR", milestones=[40, 60]), part("CosineAnnealingLR", T_max=90)]),
]

METRICS = [1 / (1 + 0.3 * i) + (0.05 if i % 7 == 3 else 0) for i in range(40)] + [0.08] * 60 + [0.05, 0.2] * 30
PLATEAUS = [
    dict(name="plain", args={}),
    dict(name="patience", args=dict(factor=0.5, patience=3, cooldown=2, min_lr=1e-3)),
    dict(name="max", args=dict(mode="max", factor=0.7, patience=4, threshold=0.01)),
    dict(name="abs", args=dict(factor=0.9, patience=0, threshold=0.02, threshold_mode="abs", eps=1e-3)),
    dict(name="max_abs", lrs=TWO, args=dict(mode="max", threshold_mode="abs", factor=0.3, patience=5, min_lr=[0.01, 1e-4])),
]


def optimizer_of(kind, lrs, last=None):
    cls, options = OPTIMIZERS[kind]
    groups = [dict(params=[torch.nn.Parameter(torch.zeros(1))], lr=lr) for lr in lrs]
    for group, lr in zip(groups, last or []):
        group["initial_lr"], group["lr"] = group["lr"], lr
    return cls(groups, **options)


def schedule_of(optimizer, kind, args, parts=None):
    args = {key.rstrip("_"): value for key, value in args.items()}
    if "lr_lambda" in args:
        names = args["lr_lambda"]
        args["lr_lambda"] = [LAMBDAS[name] for name in names] if isinstance(names, list) else LAMBDAS[names]
    cls = getattr(lr_scheduler, kind)
    if parts is None:
        return cls(optimizer, **args)
    made = [schedule_of(optimizer, **each) for each in parts]
    return cls(made) if kind == "ChainedScheduler" else cls(optimizer, made, **args)


def encoded(value):
    if isinstance(value, float) and math.isinf(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        if any(isinstance(key, int) for key in value):
            return {"items": [[key, encoded(item)] for key, item in value.items()]}
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(item) for item in value]
    return value


def numbers_of(optimizer):
    """The numbers of the param groups that schedules read and write."""
    keys = ["lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "momentum", "betas"]
    return [{key: encoded(group[key]) for key in keys if key in group} for group in optimizer.param_groups]


def momenta_of(optimizer):
    return [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]


def run(spec):
    optimizer = optimizer_of(spec["optimizer"], spec["lrs"], spec["last"])
    schedule = schedule_of(optimizer, spec["kind"], spec["args"], spec["parts"])
    half = spec["steps"] // 2
    values, momenta = [schedule.get_last_lr()], [momenta_of(optimizer)]
    for step in range(spec["steps"]):
        if step == half:
            spec.update(half=half, state=encoded(schedule.state_dict()), groups=numbers_of(optimizer))
        optimizer.step()
        schedule.step(*([spec["epochs"][step]] if spec["epochs"] else []))
        values.append(schedule.get_last_lr())
        momenta.append(momenta_of(optimizer))
    spec["values"] = values
    if spec["kind"] == "OneCycleLR":
        spec["momenta"] = momenta
    return {key: value for key, value in spec.items() if value is not None}


def run_plateau(spec):
    lrs = list(spec.get("lrs", (0.1,)))
    optimizer = optimizer_of("SGD", lrs)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, **spec["args"])
    half, values = len(METRICS) // 2, []
    for step, metric in enumerate(METRICS):
        if step == half:
            spec.update(half=half, state=encoded(schedule.state_dict()), groups=numbers_of(optimizer))
        optimizer.step()
        schedule.step(metric)
        values.append(schedule.get_last_lr())
    first = encoded(lr_scheduler.ReduceLROnPlateau(optimizer_of("SGD", lrs), **spec["args"]).state_dict())
    return dict(spec, lrs=lrs, metrics=METRICS, values=values, first_state=first)


def main():
    warnings.simplefilter("ignore")
    goldens = dict(
        torch=torch.__version__, cases=[run(spec) for spec in CASES], plateaus=[run_plateau(spec) for spec in PLATEAUS]
    )
    path = pathlib.Path(__file__).resolve().parent / "lr_goldens.json"
    # A case per line, so that a change shows which.
    lines = [f'{{"torch": {json.dumps(goldens["torch"])},']
    for key in ("cases", "plateaus"):
        rows = ",\n".join(json.dumps(row, allow_nan=False) for row in goldens[key])
        lines.append(f'"{key}": [\n{rows}\n]{"}" if key == "plateaus" else ","}')
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.name}: {len(goldens['cases'])} cases, {len(goldens['plateaus'])} plateaus")


if __name__ == "__main__":
    main()
