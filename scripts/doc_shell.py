#!/usr/bin/env python3
"""Runs the commands in the documents and compares what they print.

Usage: doc_shell.py --bin FOLDER [--python PYTHON] [PAGE...] | --self-test

FOLDER has the built programs; it comes first in PATH. Blocks under the comment
<!-- run --> are run, page by page, as one would type them: a page has one terminal,
whose folder and exported variables stay from block to block. It begins in a fresh
folder, which is also the home folder.

- ```console: lines that begin with "$ " are commands for bash. The lines below a
  command must come in its output, in this order; numbers may differ, "..." stands for
  anything. A command that fails must be followed by `echo $?`.
  <!-- run: in the clone --> runs the block in the repository, which it must not change.
- ```python: a program for PYTHON, which has torch; with none ("") it is named and
  left out. It finds the scripts of python/.

A block under <!-- file: NAME --> is written to that file in the terminal's folder.
Blocks without the comment are checked by check_docs.py alone: their flags exist.
"""
import argparse
import pathlib
import re
import os
import signal
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "docs"))
import markdown  # noqa: E402

MARK = "--doc-shell-mark--"
TIME_LIMIT = 900  # seconds for a block; some compile a program, on a busy machine
IN_CLONE = "in the clone"
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


def script_of(steps, session):
    """Goes on where the session stands, and leaves behind where it stands then."""
    lines = [f"trap 'pwd >{session.place}; export -p >{session.variables}' EXIT"]
    if session.variables.exists():
        lines.insert(0, f"source {session.variables}")
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


class Session:
    """The terminal of a page."""

    def __init__(self, folder, environment, time_limit=TIME_LIMIT):
        self.time_limit = time_limit
        self.home = folder / "home"
        self.home.mkdir()
        self.place, self.variables = folder / "place", folder / "variables"
        self.environment = {**environment, "HOME": str(self.home)}

    def folder(self):
        return pathlib.Path(self.place.read_text().strip()) if self.place.exists() else self.home

    def run(self, words, folder=None):
        """(exit code, output). What a block that takes too long has started ends with it."""
        process = subprocess.Popen(words, cwd=folder or self.folder(), env=self.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, start_new_session=True)
        try:
            output, _ = process.communicate(timeout=self.time_limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise Wrong(f"took longer than {self.time_limit} s and printed\n{output}") from None
        return process.returncode, output


def run_console(block, session):
    steps = steps_of(block.text)
    if block.directive not in ("", IN_CLONE):
        raise Wrong(f'"run: {block.directive}" is none of: run, run: {IN_CLONE}')
    folder = markdown.root() if block.directive == IN_CLONE else None
    _, output = session.run(["bash", "-c", script_of(steps, session)], folder)
    parts = re.split(rf"\n{MARK} (\d+)\n", output)
    outputs, codes = parts[0::2], [int(code) for code in parts[1::2]]
    if len(codes) != len(steps):
        raise Wrong(f"ended early and printed\n{output}")
    for index, (command, wanted) in enumerate(steps):
        followed = index + 1 < len(steps) and steps[index + 1][0].startswith("echo $?")
        if codes[index] != 0 and not followed:
            raise Wrong(f"`{command}` failed with {codes[index]}:\n{outputs[index]}")
        try:
            compare(wanted, outputs[index])
        except Wrong as wrong:
            raise Wrong(f"`{command}` {wrong}") from None


def run_python(block, session, python):
    (session.folder() / "block.py").write_text(block.text)
    status, output = session.run([python, "block.py"])
    if status != 0:
        raise Wrong(f"failed with {status}:\n{output}")


def run_block(block, session, python):
    """Whether the block was run."""
    if block.kind == "file":
        (session.folder() / block.directive).write_text(block.text + "\n")
        return False
    if block.language == "console":
        run_console(block, session)
    elif block.language == "python" and not python:
        print(f"doc_shell: {block.page}:{block.line} is not run: there is no Python with torch here")
        return False
    elif block.language == "python":
        run_python(block, session, python)
    else:
        raise Wrong(f"a block of {block.language or 'text'} cannot be run: console or python")
    return True


def run_page(page, folder, environment, python):
    """How many blocks ran."""
    session, count = Session(folder, environment), 0
    for block in page.blocks:
        if block.kind in ("run", "file"):
            try:
                count += run_block(block, session, python)
            except Wrong as wrong:
                raise Wrong(f"{block.page}:{block.line}: {wrong}") from None
    return count


def self_test():
    good = ("<!-- run -->\n```console\n$ echo one 5; echo two\none 7\ntwo\n$ false\n$ echo $?\n1\n"
            "$ echo a b \\\n    c; echo x; echo d\na ... c\n...\nd\n```\n<!-- run -->\n```python\nx = 1\n```\n```console\n$ gone\n```\n"
            "<!-- run: in the clone -->\n```console\n$ ls scripts/doc_shell.py\nscripts/doc_shell.py\n"
            "$ export WORD='a b'; mkdir ~/sub; cd ~/sub\n```\n<!-- file: kept.txt -->\n```\nkept\n```\n"
            "<!-- run -->\n```console\n$ echo \"$WORD\"; cat ~/sub/kept.txt kept.txt\na b\nkept\nkept\n```\n")
    bad = {
        "other output": "$ echo one\ntwo",
        "output in another order": "$ echo one; echo two\ntwo\none",
        "a failure": "$ false\n$ echo more",
        "an end": "$ exit 0\n$ echo more",
        "no command": "echo one",
        "another shell's variable": "$ test -n \"$WORD\"",
    }
    failures = []
    environment = dict(os.environ)

    def run(name, text):
        with tempfile.TemporaryDirectory() as folder:
            return run_page(markdown.parse(name, text), pathlib.Path(folder), environment, sys.executable)

    if run("good.md", good) != 4:
        failures.append("four blocks should run")
    for name, text in {**bad, "another place": None}.items():
        block = f"<!-- run -->\n```console\n{text}\n```\n" if text else "<!-- run: elsewhere -->\n```console\n$ true\n```\n"
        try:
            run("bad.md", block)
            failures.append(f"{name} should be refused")
        except Wrong:
            pass
    with tempfile.TemporaryDirectory() as folder:
        try:
            Session(pathlib.Path(folder), environment, time_limit=1).run(["bash", "-c", "sleep 60 & sleep 60"])
            failures.append("a block that takes too long should be refused")
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
