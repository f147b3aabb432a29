#!/usr/bin/env python3
"""Checks that each public header compiles alone: as a program's first include.

A source for each header that reads LibTorch anew would take 40 times some seconds. So
LibTorch's large headers are precompiled, and a header is compiled behind those of them
that it includes itself, directly or through headers of ours. Nothing that a header
forgot to include comes in that way: all that is there before it is what it would read
itself. Nothing is done if the headers have not changed since they were found well.

Usage: check_headers.py [--jobs N] [--self-test]
"""

import argparse
import concurrent.futures
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What takes long to read. Others may be added: too few cost time, not truth.
LARGE = ["ATen/core/Tensor.h", "torch/nn/module.h", "torch/optim/optimizer.h"]
INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", re.M)
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wnon-virtual-dtor", "-Werror", "-Winvalid-pch"]


def reached(header, folder, seen):
    """The names that `header` includes, and those that headers of ours below it do."""
    if header not in seen:
        seen.add(header)
        if (folder / header).exists():
            for name in INCLUDE.findall((folder / header).read_text()):
                reached(name, folder, seen)
    return seen


class Checker:
    def __init__(self, include, system, large, work, jobs):
        self.include, self.large, self.work, self.jobs = include, large, work, jobs
        self.compiler = os.environ.get("CXX") or "g++"
        self.flags = ["-std=c++20", *WARNINGS, f"-I{include}"]
        for folder in system:
            self.flags += ["-isystem", str(folder)]

    def run(self, words):
        result = subprocess.run([self.compiler, *self.flags, *words], capture_output=True, text=True)
        return result.returncode, result.stderr

    def headers(self):
        return sorted(str(path.relative_to(self.include)) for path in self.include.rglob("*.h"))

    def prelude_of(self, header):
        names = reached(header, self.include, set())
        return tuple(name for name in self.large if name in names)

    def precompile(self, number, prelude):
        source = self.work / f"prelude_{number}.h"
        source.write_text("".join(f"#include <{name}>\n" for name in prelude))
        status, text = self.run(["-x", "c++-header", str(source), "-o", f"{source}.gch"])
        if status != 0:
            sys.exit(f"check_headers: {', '.join(prelude)} cannot be precompiled:\n{text}")
        return source

    def compile_alone(self, header, prelude):
        source = self.work / (header.replace("/", "_") + ".cpp")
        source.write_text(f"#include <{header}>\n")
        before = ["-include", str(prelude)] if prelude else []
        status, text = self.run(["-fsyntax-only", *before, str(source)])
        return "" if status == 0 else f"<{header}> does not compile alone:\n{text}"

    def problems(self):
        self.work.mkdir(parents=True, exist_ok=True)
        preludes = {header: self.prelude_of(header) for header in self.headers()}
        kinds = sorted({prelude for prelude in preludes.values() if prelude})
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            made = dict(zip(kinds, pool.map(self.precompile, range(len(kinds)), kinds)))
            results = pool.map(lambda header: self.compile_alone(header, made.get(preludes[header])), preludes)
            return [text for text in results if text]

    def fingerprint(self):
        """Of the headers, the compiler, how it is called, and LibTorch."""
        text = hashlib.sha256(repr((self.compiler, self.flags, self.large)).encode())
        text.update(subprocess.run([self.compiler, "--version"], capture_output=True).stdout)
        text.update((ROOT / "build" / "torch-version").read_bytes())
        for header in self.headers():
            text.update(header.encode() + (self.include / header).read_bytes())
        return text.hexdigest()


def self_test():
    """A header that forgot an include is found, though its neighbours bring it."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        library, ours = folder / "library", folder / "ours" / "us"
        library.mkdir()
        ours.mkdir(parents=True)
        (library / "large.h").write_text("#pragma once\nstruct Large {};\n")
        (library / "small.h").write_text("#pragma once\nstruct Small {};\n")
        (ours / "a.h").write_text("#pragma once\n#include <large.h>\n#include <small.h>\nstruct A : Large { Small s; };\n")
        (ours / "through_a.h").write_text("#pragma once\n#include <us/a.h>\nstruct B : Large { A a; };\n")
        (ours / "forgot_ours.h").write_text("#pragma once\n#include <large.h>\nstruct C { A a; };\n")
        (ours / "forgot_large.h").write_text("#pragma once\nstruct D { Large l; };\n")
        (ours / "forgot_small.h").write_text("#pragma once\n#include <large.h>\nstruct E { Small s; };\n")
        checker = Checker(folder / "ours", [library], ["large.h"], folder / "work", 2)
        found = [re.match(r"<us/(\w+)\.h>", problem)[1] for problem in checker.problems()]
        if found != ["forgot_large", "forgot_ours", "forgot_small"]:
            sys.exit(f"check_headers: self-test failed: found {found}")
    print("check_headers: self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    torch = pathlib.Path((ROOT / "build" / "torch-root").read_text().strip())
    system = [torch / "include", torch / "include/torch/csrc/api/include"]
    work = ROOT / "build" / "headers"
    checker = Checker(ROOT / "include", system, LARGE, work, arguments.jobs)
    stamp, state = work / "well", checker.fingerprint()
    if not stamp.exists() or stamp.read_text() != state:
        problems = checker.problems()
        if problems:
            sys.exit("\n".join(problems))
        stamp.write_text(state)
    print(f"check_headers: {len(checker.headers())} headers compile alone")


if __name__ == "__main__":
    main()
