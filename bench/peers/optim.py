#!/usr/bin/env python3
"""A step of Python's fused AdamW: the peer of bench/optim_bench.cpp.

    python3 bench/peers/optim.py

The same 150 tensors, one thread. Prints one partial row.
"""

import json
import statistics
import sys
import time

import torch

TENSORS, LARGE, SMALL = 150, 520 * 512, 512
REPEATS, STEPS = 11, 5


def make_params():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(SMALL if i % 2 else LARGE)) for i in range(TENSORS)]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def timed(step):
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def main():
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(make_params(), lr=1e-4, fused=True)
    repeats = [statistics.median(timed(optimizer.step) for _ in range(STEPS)) for _ in range(REPEATS + 1)]
    fused = statistics.median(repeats[1:])  # the first warms up
    print(json.dumps({"name": "optim/adamw/20M", "peers": {"python_fused": round(fused, 3)}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
