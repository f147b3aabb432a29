#!/usr/bin/env python3
"""Checks that #include lines of include/ and src/ point the way the layers do.

    base <- libtorch <- { comm, deferred } <- engine <- { recompute, nn, state } <- optim
    these <- { transfer <- fsdp, ddp <- zero, checkpoint <- data }
    checkpoint/format <- exported/format <- { checkpoint, plan, exported }: bytes, without LibTorch
    all of these, report <- train
    all but train, and launch, plan, report <- cli
    plan: arithmetic without LibTorch, on stored checkpoints and on POLICIES of the others
    MAY_INCLUDE below has the whole of it.

Usage: check_includes.py [--self-test]
"""

import pathlib
import posixpath
import re
import sys
from typing import NamedTuple

CORE = ["libtorch", "comm", "engine", "deferred", "recompute", "nn", "state", "optim"]
FRONTS = ["transfer", "fsdp", "ddp", "zero", "checkpoint", "data"]

# What each layer may include besides itself, base and the top-level headers.
MAY_INCLUDE = {
    "base": [],
    "libtorch": [],
    "comm": ["libtorch"],
    "deferred": ["libtorch"],
    "engine": ["libtorch", "comm", "deferred"],
    "recompute": ["libtorch", "comm", "engine"],
    "nn": ["libtorch", "comm", "engine"],
    "state": ["libtorch", "comm", "engine"],
    "optim": ["libtorch", "comm", "engine", "state"],
    "transfer": CORE,
    "fsdp": CORE + ["transfer"],
    "ddp": CORE,
    "zero": CORE + ["ddp"],
    "checkpoint": CORE + ["exported/format"],
    "data": CORE + ["checkpoint"],
    "exported/format": [],  # and checkpoint/format; see check_direction
    "exported": CORE + FRONTS + ["exported/format"],
    "report": [],
    "train": CORE + FRONTS + ["exported", "report"],
    "launch": [],
    "plan": ["comm", "engine", "nn", "ddp", "zero", "checkpoint", "exported/format"],
    "cli": CORE + FRONTS + ["exported", "exported/format", "report", "launch", "plan"],
}

# What each room of comm may include of the others. Headers straight under
# src/comm/ belong to no room.
COMM_ROOMS = {
    "diagnostics": [],
    "shm": ["diagnostics"],
    "store": ["diagnostics"],
    "backends": ["diagnostics", "shm", "store"],
    "group": ["diagnostics", "shm", "store", "backends"],
}

# Every header straight under include/tessera/ or src/ belongs to no layer.
TOP = "top"
UMBRELLA = "include/tessera/tessera.h"

SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh"}
TORCH = re.compile(r"(torch|ATen|c10)/")
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(\S.*?)[ \t]*(?://.*)?$", re.M)
BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.S)

# LibTorch headers below its documented surface, and where they may be used.
# The precompiled header serves every source, so it may name c10d and autograd.
HOMES = [
    ("torch/csrc/distributed/", ("src/comm/", "src/cli/", "src/pch.h"), "c10d"),
    ("torch/csrc/autograd/", ("src/engine/", "src/deferred/", "src/exported/", "src/nn/", "src/recompute/", "src/libtorch/", "src/train/trace.cpp", "src/pch.h"), "autograd"),
    ("ATen/core/dispatch/", ("src/engine/", "src/deferred/", "src/exported/", "src/recompute/", "src/libtorch/"), "dispatcher"),
    ("torch/library.h", ("src/engine/", "src/deferred/", "src/exported/", "src/recompute/", "src/libtorch/"), "dispatcher"),
]

# A build without CUDA's headers leaves these sources out.
CUDA = re.compile(r"(ATen|c10)/cuda/|cuda(_\w+)?\.h$")
CUDA_SOURCES = ("cuda_", "nccl_")


class Include(NamedTuple):
    line: int
    quoted: bool
    name: str
    target: str | None  # path in the tree, None for a header from outside


class Problem(NamedTuple):
    path: str
    line: int
    rule: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.text} [{self.rule}]"


def layer_of(path):
    """The layer a file of the tree belongs to, or the unknown folder's name."""
    parts = path.split("/")
    inside = parts[2:] if parts[0] == "include" else parts[1:]
    if len(inside) == 1:
        return TOP
    room = "/".join(inside[:2])
    return room if room == "exported/format" else inside[0]


def resolve(path, quoted, name, tree):
    places = ["include/" + name, "src/" + name]
    if quoted:
        places.append(posixpath.normpath(posixpath.dirname(path) + "/" + name))
    return next((place for place in places if place in tree), None)


def parse(path, tree):
    """The includes of a file, and those that cannot be read as one."""
    text = BLOCK_COMMENT.sub(lambda m: "\n" * m[0].count("\n"), tree[path])
    includes, odd = [], []
    for match in INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        spelled = match[1]
        if spelled[0] + spelled[-1] not in ('""', "<>"):
            odd.append(Problem(path, line, "plain-include", f"cannot follow {spelled}; name the header"))
            continue
        quoted, name = spelled[0] == '"', spelled[1:-1]
        includes.append(Include(line, quoted, name, resolve(path, quoted, name, tree)))
    return includes, odd


# Decisions that depend on numbers alone: the library and plan share them.
POLICIES = (
    "src/comm/group/broadcast_packing.",
    "src/comm/wire_speed.",
    "src/ddp/bucket_packing.",
    "src/engine/gather_order.",
    "src/engine/idle_buffers.",
    "src/engine/layout.",
    "src/engine/reduction_order.",
    "src/nn/chunk_size.",
    "src/optim/matrix_plan.",
    "src/zero/owner_assignment.",
)


def has_no_torch(path):
    """Parts that build without LibTorch, so that they build fast and run under TSan."""
    if path.startswith("src/comm/shm/"):
        return not posixpath.basename(path).startswith("reduce_kernels.")
    rooms = ("src/base/", "src/launch/", "src/plan/", "src/report/", "src/checkpoint/format/", "src/exported/format/")
    return path.startswith(rooms + POLICIES)


def check_spelling(path, include):
    name, target = include.name, include.target
    if path.startswith("include/"):
        if include.quoted:
            yield "public-quotes", f'"{name}": a public header includes with angle brackets'
        if target and target.startswith("src/"):
            yield "public-private", f"{name} is private; a public header includes public headers only"
    elif include.quoted and target != "src/" + name:
        if target and target.startswith("include/"):
            yield "spelling", f'"{name}" is public; write <{name}>'
        elif target:
            yield "spelling", f'"{name}": write its path from src/, "{target.removeprefix("src/")}"'
        else:
            yield "spelling", f'"{name}" is not in src/; a header from outside goes in angle brackets'
    elif not include.quoted and target and target.startswith("src/"):
        yield "spelling", f'<{name}> is private; write "{name}"'
    if not include.quoted and name.startswith("tessera/") and not target:
        yield "spelling", f"<{name}> is not in include/"


def check_direction(path, include):
    target = include.target
    if not target or path == UMBRELLA:
        return
    source, wanted = layer_of(path), layer_of(target)
    if target == UMBRELLA:
        yield "umbrella", "tessera.h is for users; include the headers that are meant"
    elif path == "src/version.cpp" and target == "src/libtorch/compat.h":
        return
    elif wanted == TOP:
        if has_no_torch(path) and not has_no_torch(target):
            yield "no-torch", f"{include.name} belongs to the part with LibTorch, this one builds without"
    elif source == TOP:
        yield "direction", f"{include.name}: a top-level file includes no layer, this is {wanted}"
    elif source == "exported/format" and target.startswith("src/checkpoint/format/"):
        return
    elif wanted not in (source, "base") and wanted not in MAY_INCLUDE.get(source, []):
        allowed = ", ".join(MAY_INCLUDE.get(source, [])) or "no other layer"
        yield "direction", f"{include.name}: {source} may not include {wanted}, only {allowed}"


def comm_room(path):
    """The room of src/comm/ that a file lies in, or None."""
    parts = path.split("/")
    return parts[2] if parts[:2] == ["src", "comm"] and len(parts) == 4 else None


def check_comm_rooms(path, include):
    source, wanted = comm_room(path), comm_room(include.target or "")
    if source and wanted and source != wanted and wanted not in COMM_ROOMS.get(source, []):
        allowed = ", ".join(COMM_ROOMS.get(source, [])) or "no other room"
        yield "room", f"{include.name}: comm/{source} may not include comm/{wanted}, only {allowed}"


def check_torch(path, include):
    name = include.name
    if name in ("torch/torch.h", "torch/all.h"):
        yield "slow-header", f"<{name}> costs 15 s a file; include the small headers that are meant"
    for prefix, homes, what in HOMES:
        if name.startswith(prefix) and not path.startswith(homes):
            yield "home", f"<{name}>: {what} headers only in {', '.join(homes)}"
    if CUDA.match(name) and not posixpath.basename(path).startswith(CUDA_SOURCES):
        yield "cuda", f"<{name}>: CUDA's headers only in sources named {' or '.join(p + '*' for p in CUDA_SOURCES)}"


def path_to_torch(path, parsed, seen):
    """Names from a tree file down to a LibTorch header, or None."""
    for include in parsed[path]:
        if TORCH.match(include.name):
            return [include.name]
        if include.target and include.target not in seen:
            seen.add(include.target)
            rest = path_to_torch(include.target, parsed, seen)
            if rest:
                return [include.name] + rest
    return None


def check_no_torch(path, include, parsed):
    if not has_no_torch(path):
        return
    if TORCH.match(include.name):
        yield "no-torch", f"<{include.name}>: this part builds without LibTorch"
    elif include.target:
        chain = path_to_torch(include.target, parsed, {include.target})
        if chain:
            route = " -> ".join([include.name] + chain)
            yield "no-torch", f"{route}: this part builds without LibTorch"


def check(tree):
    """Problems of a tree, given as {path: text}."""
    problems, parsed = [], {}
    for path in sorted(tree):
        parsed[path], odd = parse(path, tree)
        problems += odd
        layer = layer_of(path)
        if layer != TOP and layer not in MAY_INCLUDE:
            problems.append(Problem(path, 1, "layer", f"{layer} is no layer; add it to MAY_INCLUDE or move the file"))
    for path, includes in parsed.items():
        for include in includes:
            found = [
                *check_spelling(path, include),
                *check_direction(path, include),
                *check_comm_rooms(path, include),
                *check_torch(path, include),
                *check_no_torch(path, include, parsed),
            ]
            problems += [Problem(path, include.line, rule, text) for rule, text in found]
    return sorted(set(problems))


# A tree without a problem; each self-test case adds one file or changes one.
CLEAN = {
    "include/tessera/api.h": "#pragma once\n",
    "include/tessera/error.h": "#include <tessera/api.h>\n#include <c10/util/Exception.h>\n",
    "include/tessera/tessera.h": "#include <tessera/comm/group.h>\n#include <tessera/fsdp/wrap.h>\n",
    "include/tessera/comm/group.h": "#include <tessera/api.h>\n#include <ATen/core/Tensor.h>\n",
    "include/tessera/fsdp/wrap.h": "#include <tessera/comm/group.h>\n",
    "include/tessera/ddp/reduce.h": "#include <tessera/comm/group.h>\n",
    "src/pch.h": "#include <torch/csrc/distributed/c10d/Store.hpp>\n",
    "src/error.cpp": "#include <tessera/error.h>\n",
    "src/comm/diagnostics/call.h": "#include <string>\n",
    "src/comm/store/store.h": "#include <torch/csrc/distributed/c10d/Store.hpp>\n",
    "src/comm/shm/ring.cpp": '#include "comm/diagnostics/call.h"\n',
    "src/comm/shm/reduce_kernels.h": "#include <c10/util/Half.h>\n",
    "src/engine/unit.h": '#include <torch/csrc/autograd/function.h>\n#include "comm/store/store.h"\n',
    "src/state/dict.h": '#include "engine/unit.h"\n',
    "src/optim/adam.h": '#include "state/dict.h"\n',
    "src/optim/cuda_adam.cpp": "#include <cuda.h>\n#include <ATen/cuda/Sleep.h>\n",
    "src/fsdp/wrap.cpp": '#include <tessera/fsdp/wrap.h>\n\n#include "optim/adam.h"\n',
    "src/zero/zero.cpp": "#include <tessera/ddp/reduce.h>\n",
    "src/checkpoint/save.h": '/* #include "fsdp/x.h" */\n// #include "fsdp/x.h"\n#include "optim/adam.h"\n',
    "src/checkpoint/format/zip.h": "#include <string>\n",
    "src/exported/format/program.h": '#include "checkpoint/format/zip.h"\n',
    "src/checkpoint/disk/pt2.cpp": '#include "exported/format/program.h"\n',
    "src/exported/module.h": '#include <ATen/core/Tensor.h>\n#include "exported/format/program.h"\n',
    "src/launch/run.h": "#include <string>\n",
    "src/cli/main.cpp": (
        '#include <torch/csrc/distributed/c10d/HashStore.hpp>\n#include "launch/run.h"\n#include "checkpoint/save.h"\n'
    ),
}

# (file, its text, the rule that must be broken, on which line)
BROKEN = [
    ("src/comm/a.cpp", '\n#include "engine/unit.h"\n', "direction", 2),
    ("src/engine/a.cpp", '#include "state/dict.h"\n', "direction", 1),
    ("src/state/a.cpp", '#include "optim/adam.h"\n', "direction", 1),
    ("src/optim/a.cpp", "#include <tessera/fsdp/wrap.h>\n", "direction", 1),
    ("src/fsdp/a.cpp", "#include <tessera/ddp/reduce.h>\n", "direction", 1),
    ("src/ddp/a.cpp", "#include <tessera/fsdp/wrap.h>\n", "direction", 1),
    ("src/zero/a.cpp", "#include <tessera/fsdp/wrap.h>\n", "direction", 1),
    ("src/checkpoint/a.cpp", "#include <tessera/fsdp/wrap.h>\n", "direction", 1),
    ("src/checkpoint/a.cpp", '#include "launch/run.h"\n', "direction", 1),
    ("src/comm/a.cpp", '#include "launch/run.h"\n', "direction", 1),
    ("src/comm/diagnostics/a.cpp", '#include "comm/store/store.h"\n', "room", 1),
    ("src/comm/store/a.cpp", '#include "comm/shm/reduce_kernels.h"\n', "room", 1),
    ("src/launch/a.cpp", '#include "comm/diagnostics/call.h"\n', "direction", 1),
    ("src/version.cpp", '#include "comm/diagnostics/call.h"\n', "direction", 1),
    ("include/tessera/comm/a.h", "#include <tessera/fsdp/wrap.h>\n", "direction", 1),
    ("src/fsdp/a.cpp", "/* one\n two */\n#include <tessera/tessera.h>\n", "umbrella", 3),
    ("src/launch/a.cpp", "#include <tessera/error.h>\n", "no-torch", 1),
    ("src/nn/a.cpp", "#include <c10/cuda/CUDAStream.h>\n", "cuda", 1),
    ("src/nn/a.cpp", "#include <cuda.h>\n", "cuda", 1),
    ("src/launch/a.cpp", "#include <c10/util/Half.h>\n", "no-torch", 1),
    ("src/plan/a.cpp", '#include "engine/unit.h"\n', "no-torch", 1),
    ("src/plan/a.cpp", '#include "launch/run.h"\n', "direction", 1),
    ("src/ddp/bucket_packing.h", "#include <ATen/ATen.h>\n", "no-torch", 1),
    ("src/comm/shm/a.cpp", "#include <tessera/api.h>\n", "no-torch", 1),
    ("src/comm/shm/a.cpp", "#include <ATen/core/Tensor.h>\n", "no-torch", 1),
    ("src/comm/shm/a.cpp", '#include "comm/shm/reduce_kernels.h"\n', "no-torch", 1),
    ("src/checkpoint/format/a.cpp", "#include <tessera/error.h>\n", "no-torch", 1),
    ("src/checkpoint/format/a.cpp", '#include "checkpoint/save.h"\n', "no-torch", 1),
    ("src/exported/format/a.cpp", '#include "checkpoint/save.h"\n', "direction", 1),
    ("src/exported/format/a.cpp", '#include "exported/module.h"\n', "direction", 1),
    ("src/exported/format/a.cpp", "#include <ATen/ATen.h>\n", "no-torch", 1),
    ("src/checkpoint/a.cpp", '#include "exported/module.h"\n', "direction", 1),
    ("src/report/a.cpp", "#include <ATen/ATen.h>\n", "no-torch", 1),
    ("src/report/a.cpp", '#include "comm/diagnostics/call.h"\n', "direction", 1),
    ("include/tessera/comm/a.h", '#include "tessera/api.h"\n', "public-quotes", 1),
    ("include/tessera/comm/a.h", "#include <comm/diagnostics/call.h>\n", "public-private", 1),
    ("src/comm/a.cpp", "#include <comm/diagnostics/call.h>\n", "spelling", 1),
    ("src/comm/a.cpp", '#include "call.h"\n', "spelling", 1),
    ("src/comm/a.cpp", '#include "tessera/api.h"\n', "spelling", 1),
    ("src/comm/a.cpp", '#include "unistd.h"\n', "spelling", 1),
    ("src/comm/a.cpp", "#include <tessera/comm/gone.h>\n", "spelling", 1),
    ("src/comm/a.cpp", "#include CONFIG_HEADER\n", "plain-include", 1),
    ("src/fsdp/a.cpp", "#include <torch/csrc/distributed/c10d/Store.hpp>\n", "home", 1),
    ("include/tessera/comm/a.h", "#include <torch/csrc/distributed/c10d/Store.hpp>\n", "home", 1),
    ("src/optim/a.cpp", "#  include <torch/csrc/autograd/function.h>\n", "home", 1),
    ("src/fsdp/a.cpp", "#include <ATen/core/dispatch/Dispatcher.h>\n", "home", 1),
    ("src/comm/a.cpp", "#include <torch/library.h>\n", "home", 1),
    ("src/comm/a.cpp", "#include <torch/torch.h>  // all of it\n", "slow-header", 1),
    ("src/misc/a.cpp", "#include <string>\n", "layer", 1),
]


def self_test():
    """Shows that every rule can fail, and that a clean tree does not."""
    failures = [f"clean tree: {problem}" for problem in check(CLEAN)]
    for path, text, rule, line in BROKEN:
        problems = check({**CLEAN, path: text})
        if (path, line, rule) not in [problem[:3] for problem in problems]:
            found = "; ".join(map(str, problems)) or "nothing"
            failures.append(f"{path} with {text!r}: expected {rule} on line {line}, found {found}")
    for failure in failures:
        print(f"check_includes self-test: {failure}")
    if not failures:
        print(f"check_includes self-test: {len(BROKEN)} broken includes found, clean tree accepted")
    return bool(failures)


def read_tree(root):
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for folder in ("include", "src")
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES
    }


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    tree = read_tree(pathlib.Path(__file__).resolve().parent.parent)
    problems = check(tree)
    for problem in problems:
        print(problem)
    if not tree:
        print("check_includes: no sources found")
    elif problems:
        print(f"check_includes: {len(problems)} problems in {len(tree)} files; the layers are in the script's head")
    else:
        print(f"check_includes: {len(tree)} files, no problems")
    return bool(problems) or not tree


if __name__ == "__main__":
    sys.exit(main())
