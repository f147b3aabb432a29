#!/usr/bin/env python3
"""Python's F.linear_cross_entropy: the peer of bench/loss_bench.cpp.

    python3 bench/peers/loss.py
    python3 bench/peers/loss.py --device cuda

The same sizes and dtypes, forward and backward, one thread. Prints one partial row;
nothing where PyTorch is older than 2.13 and has no such function.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import ranks

REPEATS, CALLS = 5, 3
# tokens, width, words, dtype
SIZES = {"cpu": (1024, 256, 32768, torch.float32), "cuda": (8192, 768, 50304, torch.bfloat16)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if not hasattr(F, "linear_cross_entropy"):
        print(f"PyTorch {torch.__version__} has no F.linear_cross_entropy: no peer")
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, width, words, dtype = SIZES[args.device]
    hidden, weight = (
        (torch.randn(rows, width, device=args.device) * 0.1).to(dtype).requires_grad_() for rows in (tokens, words)
    )
    targets = torch.randint(0, words, (tokens,), device=args.device)

    def milliseconds():
        start = time.perf_counter()
        loss = F.linear_cross_entropy(hidden, weight, targets, options=torch.nn.LinearCrossEntropyOptions())
        loss.backward()
        hidden.grad = weight.grad = None
        ranks.synchronize(args.device)
        return (time.perf_counter() - start) * 1e3

    def repeat():
        return statistics.median(milliseconds() for _ in range(ranks.times(args, CALLS)))

    repeat()  # warms up
    times = [repeat() for _ in range(ranks.times(args, REPEATS))]
    ranks.print_row(f"loss/linear-cross-entropy/{args.device}", {"python": times})


if __name__ == "__main__":
    main()
