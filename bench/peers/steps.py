#!/usr/bin/env python3
"""The step of bench/step_bench.cpp under PyTorch's own FSDP2, FSDP1 and DDP, and compiled.

    python3 bench/peers/steps.py --ranks 2
    python3 bench/peers/steps.py --ranks 1 --config 124M --device cuda

Prints partial rows; bench/run.py puts them beside ours. AdamW(fused=True), the
same model and data shapes; on a GPU with clipping. On the CPU one thread a rank and Gloo; on a GPU NCCL
and bfloat16 (FSDP's mixed precision, autocast for DDP).

On one GPU also what torch.compile makes of the model: with bfloat16 parameters, the same
with CUDA graphs (reduce-overhead), with float32 parameters under autocast, and FSDP2 with
compiled blocks. These keep their logits: the compiler fuses the loss with them, and does
not look into the loss in chunks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import ranks
from gpt import CONFIGS, Block, Gpt, add_setting, loss_of, make_ids

REPEATS, STEPS, WARM_UP = 3, 6, 3
VARIANTS = ("fsdp2", "fsdp1", "ddp")
COMPILED = ("compile", "compile_graphs", "compile_autocast", "fsdp2_compile")
COMPILED_WARM_UP = 8  # compiles, and captures


def wrap(variant, config, device):
    torch.manual_seed(0)
    model = Gpt(*config).to(device)
    is_cuda = device == "cuda"
    if variant in ("compile", "compile_graphs"):
        return model.bfloat16()
    if variant == "compile_autocast":
        return model
    if variant in ("fsdp2", "fsdp2_compile"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if is_cuda:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model.blocks:
            if variant == "fsdp2_compile":
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if variant == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device(device),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32) if is_cuda else None,
        )
    return nn.parallel.DistributedDataParallel(model)


def loss_function(variant, model):
    """ids -> loss."""
    if variant not in COMPILED:
        return lambda ids: loss_of(model, ids)
    if variant == "fsdp2_compile":
        from_logits = torch.compile(
            lambda logits, ids: F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids.view(-1))
        )
        return lambda ids: from_logits(model(ids), ids)
    mode = "reduce-overhead" if variant == "compile_graphs" else None
    return torch.compile(lambda ids: loss_of(model, ids, is_chunked=False), mode=mode)


def clip(model):
    if hasattr(model, "clip_grad_norm_"):  # FSDP1
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def measure(variant, args):
    """Milliseconds per step, and peak megabytes on a GPU, allocated and reserved; one variant at
    a time, to save memory."""
    device, config = args.device, CONFIGS[args.config]
    if variant in COMPILED:
        torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = wrap(variant, config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = make_ids(config, device)
    casts = device == "cuda" and variant in ("ddp", "compile_autocast")
    loss_of_ids = loss_function(variant, model)

    def step():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=casts):
            loss = loss_of_ids(ids)
        loss.backward()
        if device == "cuda":
            clip(model)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(ranks.times(args, COMPILED_WARM_UP if variant in COMPILED else WARM_UP)):
        step()
    times = [
        ranks.milliseconds_a_step(step, ranks.times(args, STEPS), device)
        for _ in range(ranks.times(args, REPEATS))
    ]
    if device != "cuda":
        return times, None, None
    return times, torch.cuda.max_memory_allocated() / 1e6, torch.cuda.max_memory_reserved() / 1e6


def run(_rank, args):
    variants = VARIANTS + (COMPILED if args.device == "cuda" and args.ranks == 1 else ())
    measured = {variant: measure(variant, args) for variant in variants}
    place = f"gpt-{args.config}/{args.device}{args.ranks}"
    times = {variant: of_one[0] for variant, of_one in measured.items()}
    ranks.print_row(f"step/{place}", times)
    if args.device == "cuda":
        ranks.print_row(f"step/captured/{place}", times)
        allocated = {variant: [of_one[1]] for variant, of_one in measured.items()}
        reserved = {variant: [of_one[2]] for variant, of_one in measured.items()}
        ranks.print_row(f"step/peak-memory/{place}", allocated)
        ranks.print_row(f"step/captured/peak-memory/{place}", reserved)


if __name__ == "__main__":
    parser = ranks.parser(__doc__)
    add_setting(parser)
    ranks.on_ranks(run, parser.parse_args())
