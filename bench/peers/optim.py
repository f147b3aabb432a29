#!/usr/bin/env python3
"""A step of Python's fused AdamW: the peer of bench/optim_bench.cpp.

    python3 bench/peers/optim.py
    python3 bench/peers/optim.py --device cuda

The same 150 tensors, one thread. Prints one partial row.
"""

import argparse
import statistics
import time

import torch

import ranks

TENSORS, LARGE, SMALL = 150, 520 * 512, 512
REPEATS, STEPS = 5, 5


def make_params(device):
    torch.manual_seed(0)
    sizes = [SMALL if i % 2 else LARGE for i in range(TENSORS)]
    params = [torch.nn.Parameter(torch.randn(size, device=device)) for size in sizes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(make_params(args.device), lr=1e-4, fused=True)

    def milliseconds():
        start = time.perf_counter()
        optimizer.step()
        ranks.synchronize(args.device)
        return (time.perf_counter() - start) * 1e3

    def repeat():
        return statistics.median(milliseconds() for _ in range(ranks.times(args, STEPS)))

    repeat()  # warms up
    fused = [repeat() for _ in range(ranks.times(args, REPEATS))]
    ranks.print_row(f"optim/adamw/20M/{args.device}", {"python_fused": fused})


if __name__ == "__main__":
    main()
