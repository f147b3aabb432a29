"""What the peers share: ranks as processes, clocks, and rows for bench/run.py."""

import argparse
import json
import logging
import os
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def parser(module_doc):
    """For the options that all have: --ranks and --quick."""
    result = argparse.ArgumentParser(description=module_doc.splitlines()[0])
    result.add_argument("--ranks", type=int, default=2)
    result.add_argument("--quick", action="store_true", help="everything once, to see that it runs")
    return result


def times(args, full):
    """How often to repeat what a full run does `full` times."""
    return 1 if args.quick else full


def on_ranks(body, args):
    """Runs body(rank, args) on processes that have met: over NCCL if args.device is
    "cuda", else over Gloo; one thread each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (body, args, os.path.join(folder, "meet")), nprocs=args.ranks)


def _run(rank, body, args, meet):
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backend = "nccl" if getattr(args, "device", "cpu") == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meet}", rank=rank, world_size=args.ranks)
    body(rank, args)
    dist.barrier()
    os._exit(0)  # Gloo's teardown aborts now and then


def print_row(name, peers):
    """A row with peers alone: name of the peer -> its samples. From rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        rounded = {peer: [float(f"{value:.6g}") for value in values] for peer, values in peers.items()}
        print(json.dumps({"name": name, "peers": rounded}), flush=True)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call, device="cpu"):
    """On the slowest rank."""
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    elapsed = torch.tensor([(time.perf_counter() - start) * 1e3], device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def milliseconds_a_step(step, steps, device="cpu"):
    def run():
        for _ in range(steps):
            step()

    return milliseconds(run, device) / steps
