#!/usr/bin/env python3
"""What `make demo` runs: trains a GPT on 2 ranks, kills it, resumes on 4.

The demo prints each command that it runs, so that you can try them yourself. It ends
with 1 if something is not as it should be.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
BEFORE, AFTER = 2, 4  # ranks
CURVE_ROWS = 20
CURVE_WIDTH = 48
# Sums over another number of ranks round differently, and training amplifies the difference.
MAY_DIFFER = 1e-2

LOSSES = """   Which loss is which:
   - "loss" of a step is the training loss, over the windows of that step, on all ranks;
   - "validation loss" is over text that the model is never trained on, every few hundred steps;
   - Python's is that validation loss again, computed by PyTorch from the exported file."""


def heading(text):
    print(f"\n== {text}", flush=True)


def run(words, may_fail=False):
    print("$ " + " ".join(str(word) for word in words), flush=True)
    status = subprocess.run([str(word) for word in words]).returncode
    if status != 0 and not may_fail:
        sys.exit(f"\nThe command above failed ({status}).")
    return status


def read_log(folder):
    """The attempts of a run: {"world", "from", "losses" by step}."""
    attempts = []
    for line in (folder / "log.jsonl").read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by the kill
        if entry["kind"] == "start":
            attempts.append({"world": entry["world"], "from": entry["step"], "losses": {}})
        elif entry["kind"] == "step":
            attempts[-1]["losses"][entry["step"]] = float(entry["loss"])
    return attempts


def show_curve(attempts):
    """Both attempts in one picture, with a row every few steps."""
    last = max(attempts[-1]["losses"])
    top = max(attempts[0]["losses"].values())
    every = max(1, last // CURVE_ROWS)
    print("   step    loss")
    for step in [1, *range(every, last + 1, every)]:
        number = 1 if step in attempts[-1]["losses"] else 0
        losses = attempts[number]["losses"]
        if step in losses:
            mark = "o" if number == 0 else "x"
            place = round(losses[step] / top * CURVE_WIDTH)
            print(f"   {step:4}  {losses[step]:6.3f}  |" + " " * place + mark)
    print(f"   o {attempts[0]['world']} ranks, x {attempts[-1]['world']} ranks", flush=True)


def compare(attempts):
    """The steps that both attempts made, and whether the loss fell."""
    first, second = attempts[0]["losses"], attempts[-1]["losses"]
    both = sorted(first.keys() & second.keys())
    if not both:
        sys.exit("\nThe attempts have no step in common.")
    worst = max(abs(first[s] - second[s]) / first[s] for s in both)
    last = list(second.values())[-20:]
    print(
        f"   Steps {both[0]} to {both[-1]} were made twice, on {BEFORE} ranks before the kill and on"
        f" {AFTER} after it:\n   their losses differ by {worst:.1e} of their size at most"
        f" (allowed: {MAY_DIFFER:.0e}).\n"
        f"   The loss fell from {first[1]:.2f} to {sum(last) / len(last):.2f} (the mean of the last"
        f" {len(last)} steps).",
        flush=True,
    )
    if not worst <= MAY_DIFFER or not sum(last) / len(last) < 0.8 * first[1]:
        sys.exit("\nThat is not as it should be.")


def from_here(name):
    """A file of this folder, as one would type it."""
    path = HERE / name
    return path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path


def python_with_torch(root):
    recorded = root / "build" / "python"
    return recorded.read_text().strip() if recorded.exists() else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release", type=pathlib.Path)
    parser.add_argument("--run", default="runs/demo", type=pathlib.Path, help="removed first")
    parser.add_argument("--steps", default=800, type=int)
    arguments = parser.parse_args()
    started = time.monotonic()
    tessera, gpt = arguments.build / "bin" / "tessera", arguments.build / "bin" / "gpt"
    folder = arguments.run
    tenth = max(1, arguments.steps // 10)
    die_at = 5 * tenth - tenth // 4  # a while after a checkpoint
    config, text = from_here("demo.toml"), from_here("stories.txt")
    train = [gpt, "--config", config, "--text", text, "--run", folder]
    train += ["--steps", arguments.steps, "--checkpoint-every", tenth, "--eval-every", arguments.steps // 4]
    shutil.rmtree(folder, ignore_errors=True)

    heading(f"1. Train on {BEFORE} ranks; after step {die_at} one of them kills itself")
    status = run([tessera, "run", "-n", BEFORE, *train, "--die-at", die_at], may_fail=True)
    if status == 0:
        sys.exit("\nOne rank should have died.")
    print(f"   That was meant: --die-at {die_at} let a rank kill itself, as a crash would end it.", flush=True)

    heading(f"2. Resume on {AFTER} ranks, from the newest complete checkpoint")
    run([tessera, "run", "-n", AFTER, *train, "--resume", "must"])

    heading("3. The curve goes on")
    attempts = read_log(folder)
    show_curve(attempts)
    compare(attempts)

    heading("4. Export the model")
    newest = sorted((folder / "checkpoints").glob("step_????????"))[-1]
    model = folder / "model.safetensors"
    run([tessera, "ckpt", "convert", newest, model, "--to", "safetensors", "--select", "model", "--strip-prefix", "model"])

    python = python_with_torch(HERE.parent.parent)
    if python:
        heading("5. The same model in Python")
        run([python, HERE / "in_python.py", folder])
    else:
        heading("5. There is no Python with torch here; in_python.py would open the model")
    print(LOSSES, flush=True)

    heading(f"Done in {time.monotonic() - started:.0f} s. Next:")
    print(
        f"""   open {folder}/report.html      the curves, the memory, one step as a timeline
   docs/tutorial.md      your own program, from an empty folder to two ranks, in ten minutes
   {gpt} --mode sample --config {config} --run {folder} --prompt "Anna "
   {tessera} run -n 2 {gpt} --text FOLDER --tokenizer bpe --run runs/mine      your own text
   {tessera} plan --help      how large a model fits
   examples/gpt/learner.cpp      the loop that did this; docs/trainer.md explains the program"""
    )


if __name__ == "__main__":
    main()
