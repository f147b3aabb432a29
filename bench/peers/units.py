#!/usr/bin/env python3
"""The cost of a unit under Python's FSDP2: the peer of bench/units_bench.cpp.

    python3 bench/peers/units.py --ranks 2
    python3 bench/peers/units.py --ranks 1 --device cuda
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import ranks

UNITS, WIDTH = 64, 16
REPEATS, STEPS = 3, 10


def make_step(device, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))).to(device)
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.randn(8, WIDTH, device=device)

    def step():
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(_rank, args):
    sharded, plain = make_step(args.device, True), make_step(args.device, False)
    overheads = []
    for repeat in range(ranks.times(args, REPEATS) + 1):  # the sides take turns; the first warms up
        ours, limit = (
            1e3 * ranks.milliseconds_a_step(step, ranks.times(args, STEPS), args.device)
            for step in (sharded, plain)
        )
        if repeat > 0:
            overheads.append((ours - limit) / UNITS)
    ranks.print_row(f"units/linear16x64/{args.device}{args.ranks}", {"fsdp2": overheads})


def main():
    parser = ranks.parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    ranks.on_ranks(run, parser.parse_args())


if __name__ == "__main__":
    main()
