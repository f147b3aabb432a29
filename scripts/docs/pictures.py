#!/usr/bin/env python3
"""Draws the pictures of the guides: scripts/docs/pictures.py [--check]

Writes docs/img/tutorial.svg, units.svg and checkpoints.svg; --check says whether the
files are what this script draws. The pictures of how-it-works are drawn by hand, and
docs/img/memory.svg by memory_picture.py, from plans.
"""

import argparse
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "img"

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1d2126; }
  .small { font-size: 12px; fill: #5a6470; }
  .mono { font: 13px ui-monospace, Menlo, Consolas, monospace; }
  .title { font-weight: 600; }
  .middle { text-anchor: middle; }
  .box { fill: #f5f6f8; stroke: #8a949f; }
  .shard { fill: #dcebfb; stroke: #0b5cad; }
  .whole { fill: #dff3e3; stroke: #2c7a45; }
  .write { fill: #fbe8d3; stroke: #a04a00; }
  .gone { fill: none; stroke: #8a949f; stroke-dasharray: 5 4; }
  .line { fill: none; stroke: #5a6470; stroke-width: 1.5; }
  .head { fill: #5a6470; }
  @media (prefers-color-scheme: dark) {
    text { fill: #dfe3e8; }
    .small { fill: #9aa5b1; }
    .box { fill: #20252b; stroke: #6b7680; }
    .shard { fill: #17324d; stroke: #6fb3f2; }
    .whole { fill: #173723; stroke: #86cf9d; }
    .write { fill: #45301a; stroke: #f0ab72; }
    .gone { stroke: #6b7680; }
    .line { stroke: #9aa5b1; }
    .head { fill: #9aa5b1; }
  }
"""


class Picture:
    def __init__(self, width, height, title):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t">',
            f'<title id="t">{title}</title>',
            f"<style>{STYLE}</style>",
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>',
        ]

    def text(self, x, y, words, kind=""):
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{words}</text>' if kind else
                          f'<text x="{x}" y="{y}">{words}</text>')

    def box(self, x, y, width, height, kind, words="", text_kind="middle"):
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 5, words, text_kind)

    def line(self, path, arrow=True):
        self.parts.append(f'<path class="line" d="{path}"' + (' marker-end="url(#arrow)"' if arrow else "") + "/>")

    def svg(self):
        return "\n".join([*self.parts, "</svg>", ""])


def tutorial():
    """Two ranks: shards of every block, and the block that is gathered for use."""
    picture = Picture(720, 258, "Each rank keeps a part of every block, and gathers one block at a time")
    picture.text(20, 24, "each rank keeps", "title")
    picture.text(420, 24, "while block 2 computes", "title")
    for rank in range(2):
        y = 44 + 88 * rank
        picture.text(20, y + 33, f"rank {rank}")
        for block in range(4):
            x = 82 + 66 * block
            half = 29 * rank
            picture.box(x, y, 58, 58, "gone")
            picture.box(x, y + half, 58, 29, "shard", str(block + 1))
        picture.line(f"M352 {y + 29} H408")
        for block in range(4):
            x = 420 + 66 * block
            picture.box(x, y, 58, 58, "whole" if block == 1 else "gone", "2" if block == 1 else "")
            if block != 1:
                picture.box(x, y + 29 * rank, 58, 29, "shard", str(block + 1))
    picture.text(20, 232, "Parameters, gradients and optimizer state of the other half are on the other rank. Block 2 is", "small")
    picture.text(20, 248, "gathered from both ranks, used, and freed again; block 3 is gathered while block 2 computes.", "small")
    return picture.svg()


def units():
    """What one rank of four holds, with one unit and with a unit per block."""
    picture = Picture(720, 250, "Memory of a rank over one step: one unit for the whole model, and one unit per block")
    for i, (title, high, words) in enumerate([
            ("the whole model is one unit", 1, "during a step, the whole model on every rank"),
            ("each block is a unit", 0, "at most its shards and two blocks per rank")]):
        left = 40 + 350 * i
        picture.text(left, 24, title, "title")
        picture.line(f"M{left} 190 H{left + 300}")
        picture.line(f"M{left} 190 V42")
        picture.text(left + 268, 208, "time", "small")
        picture.text(left + 8, 48, "parameters on one rank", "small")
        picture.box(left + 1, 160, 290, 29, "shard", "shards: a quarter of the model")
        if high:
            picture.box(left + 20, 70, 252, 90, "whole", "the whole model, gathered")
        else:
            for block in range(6):
                x = left + 20 + 42 * block
                picture.box(x, 145, 42, 15, "whole")
                if block < 5:
                    picture.box(x + 20, 130, 22, 15, "whole")
            picture.text(left + 146, 112, "the block in use, and the next one", "middle")
        picture.text(left, 236, words, "small")
    return picture.svg()


def checkpoints():
    """Training goes on while a save is written; other ranks read what is theirs."""
    picture = Picture(720, 318, "A save in the background, and a resume on another number of ranks")
    picture.text(20, 24, "save in the background, on 2 ranks", "title")
    for rank in range(2):
        y = 40 + 66 * rank
        picture.text(20, y + 19, f"rank {rank}")
        for step in range(5):
            x = 82 + 92 * step + (14 if step >= 2 else 0)
            picture.box(x, y, 88, 28, "box", f"step {49 + step}", "small middle")
        picture.box(264, y, 14, 28, "write")
        picture.box(280, y + 31, 212, 22, "write", f"write the shards of rank {rank}", "small middle")
    picture.text(556, 58, "copied at step 50;", "small")
    picture.text(556, 74, "training goes on", "small")
    picture.text(556, 90, "while files are written", "small")
    picture.text(20, 204, "resume, on 4 ranks", "title")
    picture.box(264, 186, 212, 58, "write")
    picture.text(370, 210, "step_00000050", "mono middle")
    picture.text(370, 230, "complete, or not there", "small middle")
    picture.line("M370 164 V184")
    for rank in range(4):
        x = 82 + 150 * rank
        picture.box(x, 276, 126, 30, "shard", f"rank {rank}: its part", "small middle")
        picture.line(f"M{290 + 53 * rank} 244 L{x + 63} 274")
    return picture.svg()


PICTURES = {"tutorial.svg": tutorial, "units.svg": units, "checkpoints.svg": checkpoints}


def stale(folder):
    return [name for name, draw in PICTURES.items()
            if not (folder / name).exists() or (folder / name).read_text() != draw()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        names = stale(FOLDER)
        for name in names:
            print(f"docs/img/{name} is not what scripts/docs/pictures.py draws: run it")
        return bool(names)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
