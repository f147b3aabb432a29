#!/usr/bin/env python3
"""Writes goldens.txt: what Python's F.linear_cross_entropy gives, for golden_test.cpp.

    python3 tests/nn/goldens.py        # with torch 2.13 or newer; writes beside itself

A case is a line with its name and options, then the loss and the gradients of input,
weight and bias, a line each. Inputs are made by formulas that are exact in binary, so
that the other side has the same bits. Python's chunked implementation is asked, with
chunks of 5 tokens; where it does not take the case, or gives NaN for the gradients of
tokens that are all ignored, Python's own reference.
"""

import pathlib

import torch
import torch.nn.functional as F

TOKENS, WIDTH, CLASSES = 13, 6, 11
CASES = {
    # name: (dtype, reduction, ignore_index, label_smoothing, has_bias, has_class_weight)
    "mean": ("float64", "mean", -100, 0.0, False, False),
    "sum": ("float64", "sum", -100, 0.0, False, False),
    "none": ("float64", "none", -100, 0.0, False, False),
    "bias": ("float64", "mean", -100, 0.0, True, False),
    "class_weight": ("float64", "mean", -100, 0.0, False, True),
    "class_weight_sum": ("float64", "sum", -100, 0.0, True, True),
    "class_weight_none": ("float64", "none", 3, 0.0, True, True),
    "ignored": ("float64", "mean", 3, 0.0, True, True),
    "ignored_sum": ("float64", "sum", 3, 0.0, True, False),
    "all_ignored": ("float64", "mean", 3, 0.0, False, False),
    "smoothed": ("float64", "mean", -100, 0.25, False, False),
    "smoothed_weighted": ("float64", "mean", 3, 0.125, True, True),
    "smoothed_sum": ("float64", "sum", 3, 0.5, True, True),
    "smoothed_none": ("float64", "none", 3, 0.25, False, True),
    "float32": ("float32", "mean", 3, 0.0, True, True),
    "bfloat16": ("bfloat16", "mean", 3, 0.0, True, True),
    "bfloat16_sum": ("bfloat16", "sum", -100, 0.0, False, False),
}


def pattern(count, factor, modulus):
    """(factor * i mod modulus - modulus // 2) / 8 for element i: exact in bfloat16."""
    return ((torch.arange(count, dtype=torch.float64) * factor) % modulus - modulus // 2) / 8


def run(name, dtype, reduction, ignore_index, label_smoothing, has_bias, has_class_weight):
    dtype = getattr(torch, dtype)
    hidden = pattern(TOKENS * WIDTH, 7, 23).view(TOKENS, WIDTH).to(dtype).requires_grad_()
    weight = pattern(CLASSES * WIDTH, 5, 19).view(CLASSES, WIDTH).to(dtype).requires_grad_()
    bias = pattern(CLASSES, 3, 7).to(dtype).requires_grad_() if has_bias else None
    class_weight = (pattern(CLASSES, 5, 13).abs() + 0.5).to(dtype) if has_class_weight else None
    targets = torch.arange(TOKENS) * 4 % CLASSES
    if name == "all_ignored":
        targets = torch.full((TOKENS,), ignore_index)
    is_for_reference = label_smoothing or name == "all_ignored"
    options = None if is_for_reference else torch.nn.LinearCrossEntropyOptions(batch_chunk_size=5)
    loss = F.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        weight=class_weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        options=options,
    )
    upstream = pattern(TOKENS, 3, 11).to(dtype) if reduction == "none" else torch.tensor(1.5, dtype=dtype)
    loss.backward(upstream)
    for what, tensor in [("loss", loss), ("hidden", hidden.grad), ("weight", weight.grad), ("bias", bias)]:
        if what == "bias" and bias is not None:
            tensor = bias.grad
        if tensor is not None:
            yield " ".join([what, *(repr(value) for value in tensor.detach().double().flatten().tolist())])


def lines():
    yield f"# Written by goldens.py with torch {torch.__version__.split('+')[0]}."
    for name, case in CASES.items():
        yield "case " + name + " " + " ".join(str(int(value) if isinstance(value, bool) else value) for value in case)
        yield from run(name, *case)


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = pathlib.Path(__file__).with_name("goldens.txt")
    target.write_text("\n".join(lines()) + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")
