#!/usr/bin/env python3
"""Runs the commands in the documents and compares what they print.

Usage: doc_shell.py --bin FOLDER [--python PYTHON] [PAGE...] | --self-test

FOLDER has the built programs; it comes first in PATH. Blocks under the comment
<!-- run --> are run, page by page, in a fresh folder for each page:

- ```console: lines that begin with "$ " are commands for bash, all of a block in
  one shell. The lines below a command must come in its output, in this order;
  numbers may differ, "..." stands for anything. A command that fails must be
  followed by `echo $?`.
- ```python: a program for PYTHON, which has torch; with none ("") it is named and
  left out. It finds the scripts of python/.

Blocks without the comment are checked by check_docs.py alone: their flags exist.
"""
import argparse
import pathlib
import re
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "docs"))
import markdown  # noqa: E402

MARK = "--doc-shell-mark--"
TIME_LIMIT = 120  # seconds for a block
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


class Wrong(Exception):
    """A block that does not do what the page says."""


def steps_of(text):
    """[(command, lines that it should print)], commands that continue joined."""
    steps = []
    for line in re.sub(r"\\\n", "", text).split("\n"):
        if line.startswith("$ "):
            steps.append((line[2:], []))
        elif steps:
            steps[-1][1].append(line)
        elif line.strip():
            raise Wrong("output without a command: a console block begins with `$ `")
    return steps


def script_of(steps):
    lines = []
    for command, _ in steps:
        lines += [command, f"status=$?; echo; echo {MARK} $status; (exit $status)"]
    return "\n".join(lines)


def pattern_of(line):
    parts = [re.escape(NUMBER.sub("#", part.strip())) for part in re.split(r"\.\.\.", " ".join(line.split()))]
    return re.compile(".*".join(parts))


def compare(wanted, output):
    """Raises for the first line of `wanted` that does not come."""
    lines = [NUMBER.sub("#", " ".join(line.split())) for line in output.split("\n")]
    at = 0
    for line in wanted:
        if not line.strip() or line.strip() == "...":
            continue
        pattern = pattern_of(line)
        found = next((i for i in range(at, len(lines)) if pattern.fullmatch(lines[i])), None)
        if found is None:
            shown = output.strip().split("\n")
            raise Wrong("\n    ".join(["does not print", line, "but", *shown[:20], *(["..."] if shown[20:] else [])]))
        at = found + 1


def run(words, folder, environment):
    try:
        return subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, text=True, timeout=TIME_LIMIT, check=False)
    except subprocess.TimeoutExpired as late:
        raise Wrong(f"took longer than {TIME_LIMIT} s and printed\n{late.stdout}") from late


def run_console(block, folder, environment):
    steps = steps_of(block.text)
    done = run(["bash", "-c", script_of(steps)], folder, environment)
    parts = re.split(rf"\n{MARK} (\d+)\n", done.stdout)
    outputs, codes = parts[0::2], [int(code) for code in parts[1::2]]
    if len(codes) != len(steps):
        raise Wrong(f"ended early and printed\n{done.stdout}")
    for index, (command, wanted) in enumerate(steps):
        followed = index + 1 < len(steps) and steps[index + 1][0].startswith("echo $?")
        if codes[index] != 0 and not followed:
            raise Wrong(f"`{command}` failed with {codes[index]}:\n{outputs[index]}")
        try:
            compare(wanted, outputs[index])
        except Wrong as wrong:
            raise Wrong(f"`{command}` {wrong}") from None


def run_python(block, folder, environment, python):
    (folder / "block.py").write_text(block.text)
    done = run([python, "block.py"], folder, environment)
    if done.returncode != 0:
        raise Wrong(f"failed with {done.returncode}:\n{done.stdout}")


def run_page(page, folder, environment, python):
    """How many blocks ran."""
    count = 0
    for block in page.blocks:
        if block.kind != "run":
            continue
        try:
            if block.language == "console":
                run_console(block, folder, environment)
            elif block.language == "python":
                if not python:
                    print(f"{block.page}:{block.line}: not run, there is no Python with torch here")
                    continue
                run_python(block, folder, environment, python)
            else:
                raise Wrong(f"a block of {block.language or 'text'} cannot be run: console or python")
        except Wrong as wrong:
            raise Wrong(f"{block.page}:{block.line}: {wrong}") from None
        count += 1
    return count


def self_test():
    good = ("<!-- run -->\n```console\n$ echo one 5; echo two\none 7\ntwo\n$ false\n$ echo $?\n1\n"
            "$ echo a b \\\n    c; echo x; echo d\na ... c\n...\nd\n```\n<!-- run -->\n```python\nx = 1\n```\n```console\n$ gone\n```\n")
    bad = {
        "other output": "$ echo one\ntwo",
        "output in another order": "$ echo one; echo two\ntwo\none",
        "a failure": "$ false\n$ echo more",
        "an end": "$ exit 0\n$ echo more",
        "no command": "echo one",
    }
    failures = []
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        if run_page(markdown.parse("good.md", good), folder, environment, sys.executable) != 2:
            failures.append("two blocks should run")
        for name, text in bad.items():
            page = markdown.parse("bad.md", f"<!-- run -->\n```console\n{text}\n```\n")
            try:
                run_page(page, folder, environment, sys.executable)
                failures.append(f"{name} should be refused")
            except Wrong:
                pass
    for failure in failures:
        print(f"doc_shell self-test: {failure}")
    if not failures:
        print(f"doc_shell self-test: {len(bad)} wrong blocks found, right ones taken")
    return bool(failures)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--bin", type=pathlib.Path)
    parser.add_argument("--python", default="python3")
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if options.self_test:
        return self_test()
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    # Threads that wait for each other by spinning are slow where cores are short.
    environment["OMP_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = str(pathlib.Path(__file__).resolve().parents[1] / "python")
    environment["PATH"] = f"{options.bin.resolve()}:{environment['PATH']}"
    failed, total = 0, 0
    for path, text in markdown.pages(markdown.root()).items():
        if options.pages and path not in options.pages:
            continue
        with tempfile.TemporaryDirectory(prefix="tessera-docs-") as folder:
            try:
                total += run_page(markdown.parse(path, text), pathlib.Path(folder), environment, options.python)
            except Wrong as wrong:
                failed += 1
                print(wrong)
    print(f"doc_shell: {total} blocks run, {failed} pages failed")
    return bool(failed) or total == 0


if __name__ == "__main__":
    sys.exit(main())
