#!/usr/bin/env python3
"""What bench/ddp_bench.cpp measures, under PyTorch's own DDP and ZeRO.

    python3 bench/peers/ddp.py --ranks 2
    python3 bench/peers/ddp.py --ranks 1 --config 124M --device cuda

Prints partial rows; bench/run.py puts them beside ours. AdamW(fused=True), the same
model and shapes. On the CPU one thread a rank and Gloo; on a GPU NCCL, autocast
to bfloat16, and clipping. PyTorch's overlap of ZeRO with DDP refuses Gloo, so that its
peer is ZeRO without; on a GPU also without clipping, which steps inside backward lack.
"""

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ranks
from gpt import CONFIGS, Gpt, add_setting, loss_of, make_ids

REPEATS, STEPS, WARM_UP = 3, 6, 3
CONSOLIDATIONS = 1  # per round: one takes seconds


def make_step(args, with_zero, clips):
    torch.manual_seed(0)
    config = CONFIGS[args.config]
    model = DistributedDataParallel(Gpt(*config).to(args.device), gradient_as_bucket_view=True)
    if with_zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = make_ids(config, args.device)

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=args.device == "cuda"):
            loss = loss_of(model, ids)
        loss.backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def consolidation():
    params = [torch.zeros(520 * 512 if i % 2 == 0 else 512, requires_grad=True) for i in range(150)]
    for param in params:
        param.grad = torch.ones_like(param)
    zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-4)
    zero.step()
    zero.consolidate_state_dict()  # warms up
    return [ranks.milliseconds(zero.consolidate_state_dict) for _ in range(CONSOLIDATIONS)]


def run(_rank, args):
    is_cuda = args.device == "cuda"
    steps = {"ddp": make_step(args, False, is_cuda), "zero": make_step(args, True, is_cuda)}
    if is_cuda:
        steps["unclipped"] = make_step(args, True, False)
    for _ in range(ranks.times(args, WARM_UP)):
        for step in steps.values():
            step()
    times = {name: [] for name in steps}
    for _ in range(ranks.times(args, REPEATS)):
        for name, step in steps.items():
            times[name].append(
                ranks.milliseconds_a_step(step, ranks.times(args, STEPS), args.device)
            )
    place = f"gpt-{args.config}/{args.device}{args.ranks}"
    ranks.print_row(f"ddp/{place}", {"ddp": times["ddp"]})
    ranks.print_row(f"zero/{place}", {"zero": times["zero"]})
    ranks.print_row(f"zero_overlap/{place}", {"zero": times["unclipped" if is_cuda else "zero"]})
    if is_cuda:
        ranks.print_row(f"ddp/captured/{place}", {"ddp": times["ddp"]})
    else:
        ranks.print_row(f"zero/consolidate/20M/cpu{args.ranks}", {"zero": consolidation()})


if __name__ == "__main__":
    parser = ranks.parser(__doc__)
    add_setting(parser)
    ranks.on_ranks(run, parser.parse_args())
