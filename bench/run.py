#!/usr/bin/env python3
"""Runs benchmarks and prints one table.

Each family is a list of commands that print rows as JSON, one object a line. A
row with peers alone belongs to the one of that name. Rows go to
build/bench/results.jsonl; those of the families that ran replace the earlier
ones, the others stay. See bench/README.md.
"""

import argparse
import atexit
import functools
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench" / "results.jsonl"


def families(build):
    """Family name -> commands. The name is the first part of its rows' names, but
    ddp has those of zero and zero_overlap too."""
    run = [f"{build}/bin/tessera", "run", "--cpu-threads", "1"]
    return {
        "checkpoint": [
            run + ["-n", "2", f"{build}/bin/checkpoint_bench", checkpoint_folder()],
            [f"{build}/bin/checkpoint_bench", checkpoint_folder(), "load_world1"],
            peer("checkpoint.py", 2) + [checkpoint_folder()],
            peer("checkpoint.py", 1) + [checkpoint_folder()],
        ],
        "comm": [
            run + ["-n", "2", f"{build}/bin/comm_bench"],
            run + ["-n", "4", f"{build}/bin/comm_bench"],
        ],
        "state": [
            run + ["-n", "2", f"{build}/bin/state_bench"],
            peer("state.py", 2),
        ],
        "step": [
            run + ["-n", "2", f"{build}/bin/step_bench"],
            peer("steps.py", 2),
        ] + (gpu_steps(build) if has_gpu() else []),
        "ddp": [
            run + ["-n", "2", f"{build}/bin/ddp_bench"],
            peer("ddp.py", 2),
        ] + (gpu_ddp(build) if has_gpu() else []),
        "monitor": [
            run + ["-n", "2", f"{build}/bin/monitor_bench"],
        ],
        "optim": [
            [f"{build}/bin/optim_bench"],
            [python_with_torch(), str(ROOT / "bench" / "peers" / "optim.py")],
        ],
        "units": [
            run + ["-n", "1", f"{build}/bin/units_bench"],
            peer("units.py", 1),
            run + ["-n", "2", f"{build}/bin/units_bench"],
            peer("units.py", 2),
        ],
    }


@functools.cache
def checkpoint_folder():
    """On the disk of the temporary files; gone at the end."""
    folder = tempfile.TemporaryDirectory(prefix="tessera_bench")
    atexit.register(folder.cleanup)
    return folder.name


def has_gpu():
    return os.path.exists("/dev/nvidiactl")


def gpu_steps(build):
    """One rank on a GPU, in bfloat16, at sizes that fill it."""
    commands = []
    for size in ("124M", "774M"):
        commands.append([f"{build}/bin/step_bench", size, "cuda"])
        commands.append(peer("steps.py", 1) + ["--config", size, "--device", "cuda"])
    return commands


def gpu_ddp(build):
    return [
        [f"{build}/bin/ddp_bench", "124M", "cuda"],
        peer("ddp.py", 1) + ["--config", "124M", "--device", "cuda"],
    ]


def peer(program, ranks):
    """A Python program of bench/peers."""
    return [python_with_torch(), str(ROOT / "bench" / "peers" / program), "--ranks", str(ranks)]


def python_with_torch():
    """The Python that set-up found LibTorch in."""
    recorded = ROOT / "build" / "python"
    return (recorded.read_text().strip() if recorded.exists() else "") or sys.executable


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def rows_of(command):
    """Runs one command; yields its rows as they come."""
    print("$ " + " ".join(os.path.relpath(w) if w.startswith("/") else w for w in command), flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        line = re.sub(r"^\[ *\d+\] ", "", line)
        if line.startswith("{"):
            yield json.loads(line)
        else:
            sys.stdout.write(line)
    if process.wait() != 0:
        sys.exit(f"the command failed with exit code {process.returncode}")


def print_row(row):
    larger_is_better = row["unit"].endswith("/s")
    cells = [f"{row['name']:<34}", f"{row['ours']:>11.2f} {row['unit']:<4}"]
    for peer, value in row["peers"].items():
        ratio = row["ours"] / value if larger_is_better else value / row["ours"]
        cells.append(f"{peer} {value:>11.2f} ({ratio:.2f}x)")
    if row.get("limit"):
        limit = row["limit"]
        share = row["ours"] / limit if larger_is_better else limit / row["ours"]
        spread = row.get("limit_spread", 0)
        note = f", unresolved: it spreads by {spread:.0%}" if spread > 0.2 else ""
        cells.append(f"limit {limit:>10.2f} ({share:.0%}{note})")
    cells.append(f"spread {row['spread']:.0%}")
    print("  ".join(cells), flush=True)


def load_results():
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text().splitlines() if line]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--only", default="", help="one family")
    args = parser.parse_args()
    known = families(os.path.abspath(args.build))
    if args.only and args.only not in known:
        sys.exit(f"there is no family \"{args.only}\"; choose one of: {', '.join(known)}")
    chosen = [args.only] if args.only else list(known)

    version = subprocess.run(
        [f"{args.build}/bin/tessera", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(f"{version}; {cpu_name()}, {len(os.sched_getaffinity(0))} cores; {platform.platform()}")
    print("(Nx): how many times faster than the peer; (N%): share of the limit's speed")
    rows = {}
    for family in chosen:
        own = []
        waits_for_peers = len(known[family]) > 1 and family != "comm"
        for command in known[family]:
            for row in rows_of(command):
                if "ours" in row:
                    rows[row["name"]] = row
                    own.append(row)
                else:
                    rows[row["name"]]["peers"].update(row["peers"])
                if not waits_for_peers:
                    print_row(row)
        if waits_for_peers:
            for row in own:
                print_row(row)

    kept = [r for r in load_results() if r["name"].split("/")[0] not in chosen and r["name"] not in rows]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *rows.values()]))
    print(f"{len(rows)} rows in {os.path.relpath(RESULTS)}")


if __name__ == "__main__":
    main()
