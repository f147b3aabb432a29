"""The model FLOPS utilization of a GPT's step: the share of a GPU's peak that the model's own
arithmetic takes.

Usage: mfu.py --self-test
"""

import re
import sys

import results

sys.path.insert(0, str(results.ROOT / "bench" / "peers"))
import sizes

# TFLOPS of dense bfloat16 matrices, from the vendor's data sheets.
PEAK_TFLOPS = {"H200 NVL": 835.5, "H200": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756, "H100": 989.4, "A100": 312}


def peak_of(gpu_name):
    """None for a GPU that is not in the table."""
    words = gpu_name.replace("-", " ").split()
    for name, peak in PEAK_TFLOPS.items():
        parts = name.split()
        if any(words[i : i + len(parts)] == parts for i in range(len(words))) and "MIG" not in words:
            return peak
    return None


def add_to(row, gpu_name):
    """Puts "mfu" and "peers_mfu" into a row of a step of a GPT on GPUs; leaves others alone."""
    match = re.search(r"/gpt-([^/]+)/cuda(\d+)$", row["name"])
    peak = peak_of(gpu_name)
    # In bfloat16 are those that do not fit the CPU.
    if row["unit"] != "ms" or not match or match[1] == "tiny" or match[1] not in sizes.CONFIGS or peak is None:
        return
    flops = sizes.flops_a_step(sizes.CONFIGS[match[1]])

    def share(milliseconds):
        return results.rounded(flops / (milliseconds / 1e3) / (peak * 1e12))

    row["mfu"] = share(row["ours"])
    row["peers_mfu"] = {peer: share(value) for peer, value in row["peers"].items()}


def self_test():
    # 124M of parameters without the embeddings of the input, 8,192 tokens.
    flops = sizes.flops_a_step(sizes.CONFIGS["124M"])
    assert abs(flops / (8192 * (6 * 123.7e6 + 12 * 12 * 768 * 1024)) - 1) < 1e-3, flops
    row = {"name": "step/gpt-124M/cuda1", "unit": "ms", "ours": 20.0, "peers": {"fsdp2": 40.0}}
    add_to(row, "NVIDIA H200")
    assert abs(row["mfu"] / (flops / 0.02 / 989.4e12) - 1) < 1e-3, row
    assert abs(row["peers_mfu"]["fsdp2"] * 2 - row["mfu"]) < 1e-4, row
    for name, unit, gpu in (
        ("step/gpt-124M/cpu2", "ms", "NVIDIA H200"),
        ("step/peak-memory/gpt-124M/cuda1", "MB", "NVIDIA H200"),
        ("step/gpt-tiny/cuda1", "ms", "NVIDIA H200"),
        ("step/gpt-124M/cuda1", "ms", "GeForce"),
    ):
        other = {"name": name, "unit": unit, "ours": 1.0, "peers": {}}
        add_to(other, gpu)
        assert "mfu" not in other, other
    assert peak_of("NVIDIA H100 PCIe") == 756 and peak_of("NVIDIA A100-SXM4-80GB") == 312
    print("mfu: self-test passed")


if __name__ == "__main__":
    if sys.argv[1:] != ["--self-test"]:
        sys.exit(__doc__)
    self_test()
