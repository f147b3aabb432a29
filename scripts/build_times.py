#!/usr/bin/env python3
"""Where a build's time went, from ninja's log: by target, and the slowest steps.

Seconds are those of each step's own clock, added up. Steps that run beside each other
share the processor, so on a busy machine the sum is above the CPU time. The log keeps
the newest run of each step: after a fresh build it is that build, later a mixture. Steps
whose output is gone are left out.

Usage: build_times.py [FOLDER] [--worst N] | --self-test
"""

import argparse
import collections
import pathlib
import re
import sys
from typing import NamedTuple

VERSIONS = ("5", "6", "7")
OBJECT = re.compile(r"CMakeFiles/(?P<target>[^/]+)\.dir/(?P<file>.+)$")


class Step(NamedTuple):
    target: str
    file: str
    seconds: float


class Broken(Exception):
    pass


def step_of(output, seconds):
    match = OBJECT.search(output)
    if match is None:
        return Step("(linking and the rest)", output, seconds)
    file = re.sub(r"\.(o|gch)$", "", match["file"])
    if file.startswith("cmake_pch"):
        file = "precompiled header"
    return Step(match["target"], file, seconds)


def read_log(text, is_there):
    """The steps of a log; what one command made is one step, by its first output."""
    lines = text.splitlines()
    version = re.fullmatch(r"# ninja log v(\d+)", lines[0]) if lines else None
    if version is None or version[1] not in VERSIONS:
        raise Broken(f"this is no log of ninja, version {' or '.join(VERSIONS)}")
    newest = {}  # output to its last line
    for line in lines[1:]:
        fields = line.split("\t")
        if len(fields) != 5 or not is_there(fields[3]):
            continue  # torn by a build that was stopped, or of an earlier tree
        newest[fields[3]] = (int(fields[0]), int(fields[1]), fields[4])
    steps, seen = [], set()
    for output, (start, end, command) in newest.items():
        if (start, end, command) not in seen:
            seen.add((start, end, command))
            steps.append(step_of(output, (end - start) / 1000))
    return steps


def table(steps, worst):
    sums, counts = collections.Counter(), collections.Counter()
    for step in steps:
        sums[step.target] += step.seconds
        counts[step.target] += 1
    lines = ["seconds  steps  target"]
    lines += [f"{seconds:7.1f}  {counts[target]:5}  {target}" for target, seconds in sums.most_common()]
    lines += [f"{sum(sums.values()):7.1f}  {len(steps):5}  all", "", f"seconds  the slowest {worst} steps"]
    slowest = sorted(steps, key=lambda step: -step.seconds)[:worst]
    lines += [f"{step.seconds:7.1f}  {step.target}: {step.file}" for step in slowest]
    return "\n".join(lines)


def self_test():
    log = (
        "# ninja log v5\n"
        "0\t9000\t1\tsrc/CMakeFiles/lib.dir/a.cpp.o\taaaa\n"
        "10\t4010\t1\tsrc/CMakeFiles/lib.dir/a.cpp.o\taaaa\n"  # made again: the newest counts
        "0\t2500\t1\tsrc/CMakeFiles/lib.dir/cmake_pch.hxx.gch\tbbbb\n"
        "20\t1020\t1\tone.cpp\tcccc\n"
        "20\t1020\t1\ttwo.cpp\tcccc\n"  # of the same command
        "20\t1020\t1\tgone.cpp\tdddd\n"
        "30\t10"
    )
    steps = read_log(log, lambda output: output != "gone.cpp")
    expected = [
        Step("lib", "a.cpp", 4.0),
        Step("lib", "precompiled header", 2.5),
        Step("(linking and the rest)", "one.cpp", 1.0),
    ]
    text = table(steps, 1)
    refused = 0
    for wrong in ("", "# ninja log v4\n", "something else\n"):
        try:
            read_log(wrong, lambda output: True)
        except Broken:
            refused += 1
    if steps != expected or "    6.5      2  lib\n" not in text or "    7.5      3  all\n" not in text or refused != 3:
        sys.exit(f"build_times: self-test failed: {steps}\n{text}")
    if not text.endswith("    4.0  lib: a.cpp"):
        sys.exit(f"build_times: self-test failed:\n{text}")
    print("build_times: self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="build/release", type=pathlib.Path)
    parser.add_argument("--worst", type=int, default=20, help="steps to list (20)")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    log = arguments.folder / ".ninja_log"
    try:
        steps = read_log(log.read_text(), lambda output: (arguments.folder / output).exists())
        print(table(steps, arguments.worst))
    except (OSError, Broken) as error:
        sys.exit(f"build_times: {log}: {error}")


if __name__ == "__main__":
    main()
