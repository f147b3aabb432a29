#!/usr/bin/env python3
"""Draws docs/img/memory.svg: the memory per rank of one model on 1 to 16 ranks.

    scripts/docs/memory_picture.py build/release/bin/tessera > docs/img/memory.svg

The bytes are planned, not measured: those of `tessera plan`. Tests compare plans of
the CPU with measured runs; docs/plan.md has two runs on a GPU beside their plans.
"""

import json
import subprocess
import sys

RANKS = [1, 2, 4, 8, 16]
MODEL = ["--layers", "24", "--width", "2048", "--length", "2048", "--batch", "2", "--recompute"]
SETUP = ["--param-dtype", "bf16", "--device", "cuda"]
KINDS = [
    ("shards", "parameters", "#2f6f9f"),
    ("optimizer", "optimizer state", "#5aa9a3"),
    ("gradients", "gradients", "#d98b3a"),
    ("full", "gathered for use", "#9c6bb0"),
    ("activations", "activations", "#b8c0c8"),
]
WIDTH, HEIGHT, LEFT, BASE, TOP, BAR = 760, 330, 70, 270, 66, 70


def plan(tessera, ranks):
    command = [tessera, "plan", *MODEL, *SETUP, "--world", str(ranks), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def text(x, y, words, anchor="start", size=13, weight="normal"):
    return (f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}">{words}</text>')


def main():
    plans = [plan(sys.argv[1], ranks) for ranks in RANKS]
    totals = [p["device_memory"]["at_peak"]["total"] for p in plans]
    scale = (BASE - TOP) / max(totals)
    parameters = plans[0]["model"]["parameters"]
    title = f"Memory per rank of a GPT with {parameters / 1e9:.1f} billion parameters, by number of ranks"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
           f'aria-label="{title}" font-family="sans-serif">',
           "<style>text { fill: #1d2126 } line { stroke: #8a949f }"
           " @media (prefers-color-scheme: dark) { text { fill: #dfe3e8 } }</style>",
           text(LEFT, 28, title, size=15, weight="bold"),
           f'<line x1="{LEFT}" y1="{BASE}" x2="{LEFT + 5 * 90}" y2="{BASE}"/>']
    for i, (ranks, planned, total) in enumerate(zip(RANKS, plans, totals)):
        x, y = LEFT + 10 + i * 90, BASE
        for kind, _, colour in KINDS:
            height = planned["device_memory"]["at_peak"][kind] * scale
            y -= height
            out.append(f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" fill="{colour}"/>')
        out.append(text(x + BAR / 2, y - 6, f"{total / 1e9:.1f} GB", "middle", weight="bold"))
        out.append(text(x + BAR / 2, BASE + 20, f"{ranks} rank{'s' if ranks > 1 else ''}", "middle"))
    for i, (_, words, colour) in enumerate(reversed(KINDS)):
        y = TOP + 20 + i * 26
        out.append(f'<rect x="550" y="{y - 12}" width="16" height="16" fill="{colour}"/>')
        out.append(text(576, y + 1, words))
    out.append(text(LEFT, HEIGHT - 14, "tessera plan: bfloat16 compute over float32 shards, AdamW, recomputation", size=12))
    out.append("</svg>")
    print("\n".join(out))


if __name__ == "__main__":
    main()
