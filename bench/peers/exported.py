#!/usr/bin/env python3
"""The models of bench/exported_bench.cpp: exports them, or times the GPT's step in Python's eager mode.

    python3 bench/peers/exported.py --export build/bench/exported
    python3 bench/peers/exported.py --ranks 1
    python3 bench/peers/exported.py --ranks 1 --config 124M --device cuda

Timing prints a partial row; bench/run.py puts it beside ours.
"""

import pathlib

import torch
import torch.nn as nn

import ranks
from gpt import CONFIGS, Gpt, add_setting, loss_of, make_ids

REPEATS, STEPS, WARM_UP = 3, 8, 4
CHAIN_NODES = 1000


class Chain(nn.Module):
    """Nodes that do next to nothing: their time is what a node costs."""

    def forward(self, x):
        for _ in range(CHAIN_NODES):
            x = x.neg()
        return x


def export(args):
    folder = pathlib.Path(args.export)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = CONFIGS[args.config]
    models = {f"gpt-{args.config}": (Gpt(*config), make_ids(config, "cpu")), "chain": (Chain(), torch.randn(1))}
    for name, (model, example) in models.items():
        torch.export.save(torch.export.export(model, (example,), strict=False), folder / f"{name}.pt2")


def measure(args):
    config = CONFIGS[args.config]
    torch.manual_seed(0)
    model = Gpt(*config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = make_ids(config, args.device)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda"):
            loss = loss_of(model, ids, is_chunked=False)  # the exported model returns its logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(ranks.times(args, WARM_UP)):
        step()
    times = [
        ranks.milliseconds_a_step(step, ranks.times(args, STEPS), args.device)
        for _ in range(ranks.times(args, REPEATS))
    ]
    ranks.print_row(f"exported/gpt-{args.config}/{args.device}1", {"eager": times})


def run(_rank, args):
    measure(args)


if __name__ == "__main__":
    parser = ranks.parser(__doc__)
    add_setting(parser)
    parser.add_argument("--export", metavar="FOLDER", help="write the models there, and time nothing")
    arguments = parser.parse_args()
    if arguments.export:
        export(arguments)
    else:
        ranks.on_ranks(run, arguments)
