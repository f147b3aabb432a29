#!/usr/bin/env python3
"""Writes the log of an invented training run, in the format of docs/report.md.

    make_log.py RUN [--steps N] [--kill-at STEP] [--bare]

Two attempts: the first, on 2 ranks, is killed in the middle of a line; the second
resumes on 4 ranks from the last checkpoint and finishes. The same arguments give
the same bytes.
"""

import argparse
import json
import math
import pathlib
import random

EPOCH = 1763200000.0
CHECKPOINT_EVERY = 20
EVAL_EVERY = 10
TOKENS = 4096

UNITS = [("embed", 262_144)] + [(f"blocks.{i}", 789_760) for i in range(6)] + [("(root)", 263_168)]


class Log:
    """Lines of a log, with a clock of its own."""

    def __init__(self):
        self.lines = []
        self.time = EPOCH

    def add(self, kind, **fields):
        self.lines.append(json.dumps({"kind": kind, "time": round(self.time, 3), **fields}))

    def text(self):
        return "".join(line + "\n" for line in self.lines)


def units(world):
    return [
        {"name": name, "parameters": n, "full_bytes": 4 * n, "shard_bytes": 4 * math.ceil(n / world)}
        for name, n in UNITS
    ]


def config(world):
    return {
        "model": {"layers": 6, "width": 256, "heads": 8, "context": 256, "dropout": 0.0},
        "optimizer": {"name": "AdamW", "lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "data": {"folder": "include/torch", "batch": 16, "shuffle": True, "seed": 1337},
        "strategy": "fsdp",
        "mixed_precision": "bf16",
        "accumulate": 1 if world == 4 else 2,
    }


def memory(step, world):
    total = 4 * sum(n for _, n in UNITS)
    largest = 4 * max(n for _, n in UNITS)
    return {
        "shards": total // world,
        "full": 2 * largest + (step % 3) * 4096,
        "gradients": total // world,
        "optimizer": 2 * total // world if step > 1 else 0,
        "activations": 9_400_000 // world * 2 + (step * 7919) % 900_000,
        "other": 350_000,
    }


def learning_rate(step, steps):
    warm = max(1, steps // 10)
    if step <= warm:
        return 1e-3 * step / warm
    return 1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def loss_at(step, noise):
    return 1.35 + 4.2 * math.exp(-step / 28) + noise.gauss(0, 0.05)


def timeline_of(rank, world, noise):
    """Forward and backward over the units, gathers one unit ahead."""
    names = [name for name, _ in UNITS]
    spans = []
    state = {"compute": 0.0, "comm": 0.0}

    def communicate(lane, name, seconds, not_before=0.0):
        start = max(state["comm"], not_before)
        state["comm"] = start + seconds * noise.uniform(0.85, 1.25)
        spans.append({"lane": lane, "name": name, "start": round(start, 6), "end": round(state["comm"], 6)})
        return state["comm"]

    def compute(name, seconds, ready):
        if ready > state["compute"] + 1e-5:
            spans.append({"lane": "wait", "name": f"{name}: gather", "start": round(state["compute"], 6),
                          "end": round(ready, 6)})
            state["compute"] = ready
        start = state["compute"]
        state["compute"] = start + seconds * noise.uniform(0.9, 1.15)
        spans.append({"lane": "compute", "name": name, "start": round(start, 6), "end": round(state["compute"], 6)})

    for phase, order, cost in (("forward", names, 0.011), ("backward", names[::-1], 0.023)):
        ready = communicate("gather", order[0], 0.006, state["compute"])
        for place, name in enumerate(order):
            following = order[place + 1] if place + 1 < len(order) else None
            begun = max(state["compute"], ready)
            upcoming = communicate("gather", following, 0.008 * 2 / world + 0.004, begun) if following else 0.0
            compute(f"{name} {phase}", cost * (0.4 if name in ("embed", "(root)") else 1.0), ready)
            if phase == "backward":
                communicate("reduce", name, 0.006, state["compute"])
            ready = upcoming
    compute("optimizer step", 0.009, state["comm"])
    return {"rank": rank, "spans": spans}


def attempt(log, number, world, first, last, steps, noise):
    """Steps first + 1 to last."""
    log.add("start", format=1, attempt=number, step=first, world=world, device="cpu", name="demo",
            versions={"tessera": "0.1.0", "libtorch": "2.13.0"}, host="node-7", config=config(world),
            units=units(world))
    log.time += 1.5
    if first > 0:
        log.add("resume", step=first, path=f"checkpoints/step_{first:08}")
    for step in range(first + 1, last + 1):
        seconds = (0.36 if world == 2 else 0.27) * noise.uniform(0.94, 1.08) * (2.2 if step == first + 1 else 1)
        log.time += seconds
        log.add("step", step=step, loss=loss_at(step, noise), lr=learning_rate(step, steps),
                grad_norm=0.4 + 2.5 * math.exp(-step / 20) + abs(noise.gauss(0, 0.12)),
                tokens=TOKENS, seconds=round(seconds, 5), memory=memory(step, world))
        if step == first + 10:
            log.add("timeline", step=step, ranks=[timeline_of(rank, world, noise) for rank in range(world)])
        if step % EVAL_EVERY == 0:
            log.time += 0.4
            log.add("eval", step=step, loss=loss_at(step, noise) + 0.04)
        if step % (steps // 3) == 0:
            log.add("sample", step=step, prompt="template <class ",
                    text="T>\nstruct TORCH_API Tensor" + ("" if step < steps else "Impl") + " {\n  int64_t size_;\n};\n")
        if step % CHECKPOINT_EVERY == 0:
            log.time += 0.05
            log.add("checkpoint", step=step, path=f"checkpoints/step_{step:08}",
                    blocked_seconds=round(noise.uniform(0.004, 0.009), 4))


def make(steps=150, kill_at=95):
    noise = random.Random(7)
    log = Log()
    attempt(log, 0, 2, 0, kill_at, steps, noise)
    torn = log.lines.pop()
    log.lines.append(torn[: len(torn) // 2])
    log.time += 6.0
    attempt(log, 1, 4, kill_at // CHECKPOINT_EVERY * CHECKPOINT_EVERY, steps, steps, noise)
    log.add("end", step=steps, reason="finished")
    return log


def make_bare():
    """The smallest log: no units, memory, timeline, evaluations, end."""
    log = Log()
    log.add("start", format=1, attempt=0, step=0, world=1, device="cpu")
    for step in range(1, 6):
        log.time += 1
        log.add("step", step=step, loss=3.0 - step / 10 if step != 3 else "nan")
    return log


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--kill-at", type=int, default=95)
    parser.add_argument("--bare", action="store_true")
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    log = make_bare() if args.bare else make(args.steps, args.kill_at)
    (args.run / "log.jsonl").write_text(log.text())


if __name__ == "__main__":
    main()
