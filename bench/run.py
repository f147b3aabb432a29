#!/usr/bin/env python3
"""Runs benchmarks beside their peers, prints one table and writes the results.

    bench/run.py                                   all that this machine can run
    bench/run.py --only step,ddp --device cuda --out h200.jsonl
    bench/run.py --quick --without-peers           see that the programs run

Commands of a contest take turns, round by round: ours, peer, ours, peer. Each
prints rows as lines of JSON, with all its samples; medians are taken over all
rounds. See bench/README.md.
"""

import argparse
import atexit
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time

import mfu
import results
from results import number

RESULTS = results.ROOT / "build" / "bench" / "results.jsonl"
EXPORTED = results.ROOT / "build" / "bench" / "exported"


@dataclasses.dataclass
class Contest:
    """Commands that take turns. `seconds`: about how long a round takes."""

    family: str
    device: str
    seconds: int
    commands: list
    rounds: int = 3
    setup: object = None  # called before the first round
    brief: int = None  # how many of the commands show that all of them run


def contests(build):
    def ranks(count, program, *words):
        launcher = [f"{build}/bin/tessera", "run", "--cpu-threads", "1", "-n", str(count)]
        return launcher + [f"{build}/bin/{program}", *words]

    def alone(program, *words):
        return [f"{build}/bin/{program}", *words]

    def both(program, peer_program, size):
        """Ours and the peer's, on one rank of a GPU."""
        options = ["--config", size, "--device", "cuda"]
        return [alone(program, size, "cuda"), peer(peer_program, "--ranks", "1", *options)]

    folder = checkpoint_folder()
    exported = str(EXPORTED)
    return [
        Contest(
            "checkpoint",
            "cpu",
            65,
            [
                ranks(2, "checkpoint_bench", folder),
                peer("checkpoint.py", "--ranks", "2", folder),
                alone("checkpoint_bench", folder, "load_world1"),
                peer("checkpoint.py", "--ranks", "1", folder),
            ],
            rounds=2,
        ),
        Contest("comm", "cpu", 15, [ranks(2, "comm_bench"), peer("comm.py", "--ranks", "2")], rounds=2),
        Contest("comm", "cpu", 55, [ranks(4, "comm_bench"), peer("comm.py", "--ranks", "4")], rounds=2),
        Contest("overlap", "cpu", 70, on_wires(alone), brief=1),
        Contest("overlap", "cuda", 110, on_fast_wires(alone), rounds=1, brief=1),
        Contest("scale", "cpu", 90, at_each_scale(alone), brief=4),
        Contest("state", "cpu", 22, [ranks(2, "state_bench"), peer("state.py", "--ranks", "2")]),
        Contest("step", "cpu", 32, [ranks(2, "step_bench"), peer("steps.py", "--ranks", "2")]),
        Contest("step", "cuda", 60, both("step_bench", "steps.py", "tiny")),
        Contest("step", "cuda", 140, both("step_bench", "steps.py", "124M")),
        Contest("step", "cuda", 240, both("step_bench", "steps.py", "774M"), rounds=2),
        Contest("ddp", "cpu", 40, [ranks(2, "ddp_bench"), peer("ddp.py", "--ranks", "2")]),
        Contest("ddp", "cuda", 35, both("ddp_bench", "ddp.py", "124M")),
        Contest("exported", "cpu", 15, [ranks(1, "exported_bench", exported), peer("exported.py", "--ranks", "1")], setup=export_models("tiny")),
        Contest("exported", "cpu", 20, [ranks(2, "exported_bench", exported)], setup=export_models("tiny")),
        Contest(
            "exported",
            "cuda",
            45,
            [
                alone("exported_bench", exported, "124M", "cuda"),
                peer("exported.py", "--ranks", "1", "--config", "124M", "--device", "cuda"),
            ],
            setup=export_models("124M"),
        ),
        Contest("ladder", "cuda", 40, [alone("ladder_bench", "124M", "cuda")], rounds=1),
        Contest("loader", "cpu", 20, [ranks(2, "loader_bench")], rounds=1),
        Contest("loader", "cuda", 25, [alone("loader_bench", "124M", "cuda")], rounds=1),
        Contest("loss", "cpu", 15, [alone("loss_bench"), peer("loss.py")]),
        Contest("loss", "cuda", 10, [alone("loss_bench", "cuda"), peer("loss.py", "--device", "cuda")]),
        Contest("monitor", "cpu", 20, [ranks(2, "monitor_bench")], rounds=1),
        Contest("muon", "cpu", 25, [ranks(2, "muon_bench")], rounds=1),
        Contest("optim", "cpu", 8, [alone("optim_bench"), peer("optim.py")]),
        Contest("optim", "cuda", 8, [alone("optim_bench", "cuda"), peer("optim.py", "--device", "cuda")]),
        Contest("units", "cpu", 8, [ranks(1, "units_bench"), peer("units.py", "--ranks", "1")]),
        Contest("units", "cpu", 20, [ranks(2, "units_bench"), peer("units.py", "--ranks", "2")]),
        Contest(
            "units",
            "cuda",
            12,
            [alone("units_bench", "cuda"), peer("units.py", "--ranks", "1", "--device", "cuda")],
        ),
    ]


def on_wires(alone):
    """Worlds that are not there, and how many times the wire's time computing takes."""
    wires = [("8", "1.2"), ("64", "1.2"), ("1024", "1.2"), ("8x8", "1.2"), ("64", "2"), ("1024", "2"), ("64", "2", "4")]
    return [alone("overlap_bench", *wire) for wire in wires]


def on_fast_wires(alone):
    """NVLink within a host, 50 GB/s per GPU between hosts; and computing by the wire's time."""
    wires = [("8", "400GB", "1"), ("64", "50GB", "1"), ("1024", "50GB", "1"), ("64", "1.2", "4"), ("64", "2", "4")]
    return [alone("overlap_bench", *wire, size, "cuda") for size in ("124M", "774M") for wire in wires]


def at_each_scale(alone):
    """Ours with both layouts, then the peer, in ever larger worlds."""
    commands = []
    for ranks in ("8", "128", "1024", "4096", "16384"):
        commands += [alone("scale_bench", ranks, layout) for layout in ("flat", "dim0")]
        commands.append(peer("scale.py", "--ranks", ranks))
        commands.append(alone("scale_exchange_bench", ranks))
    return commands


@functools.cache
def checkpoint_folder():
    """A folder on the disk of the temporary files, removed at the end."""
    folder = tempfile.TemporaryDirectory(prefix="tessera_bench")
    atexit.register(folder.cleanup)
    return folder.name


def export_models(size):
    """Lets Python write the models of exported_bench."""
    return lambda: subprocess.run(peer("exported.py", "--export", str(EXPORTED), "--config", size), check=True)


def peer(program, *words):
    """A Python program of bench/peers, by the Python that set-up found LibTorch in."""
    python = results.recorded("python") or sys.executable
    return [python, str(results.ROOT / "bench" / "peers" / program), *words]


def is_peer(command):
    return any(word.endswith(".py") for word in command)


# ---- Running ---------------------------------------------------------------


class Failed(Exception):
    pass


def shown(command):
    """As a user would type it in the checkout."""
    words = ["python3", *command[1:]] if is_peer(command) else command
    inside = [os.path.relpath(w, results.ROOT) if w.startswith(str(results.ROOT)) else w for w in words]
    return " ".join("FOLDER" if word == checkpoint_folder() else word for word in inside)


def rows_of(command):
    """Runs one command; yields its rows as they come."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        line = re.sub(r"^\[ *\d+\] ", "", line)
        if line.startswith("{"):
            yield json.loads(line)
        else:
            sys.stdout.write(line)
    if process.wait() != 0:
        raise Failed(f"exit code {process.returncode} from: {shown(command)}")


def take(row, samples, commands, command):
    """Adds a row's samples to those of earlier rounds and other commands."""
    name = row["name"]
    if "ours" in row:
        own = samples.setdefault(name, {**row, "ours": [], "limit": [], "peers": {}})
        own["ours"] += row["ours"]
        own["limit"] += row.get("limit", [])
    elif name not in samples:
        raise Failed(f"a peer has a row that we have not, {name}: {shown(command)}")
    for peer_name, values in row["peers"].items():
        samples[name]["peers"].setdefault(peer_name, []).extend(values)
    if shown(command) not in commands.setdefault(name, []):
        commands[name].append(shown(command))


def run_contest(contest, rounds, on_round):
    """The rows of a contest. Calls on_round() before each round."""
    samples, commands = {}, {}
    if contest.setup:
        contest.setup()
    for i in range(rounds):
        on_round(i)
        for command in contest.commands:
            print("$ " + shown(command), flush=True)
            for row in rows_of(command):
                take(row, samples, commands, command)
    if not samples:
        raise Failed(f"no row came from: {shown(contest.commands[0])}")
    return [{**results.summarize(own), "commands": commands[name]} for name, own in samples.items()]


class Progress:
    """Where a run is, and when it may be done."""

    def __init__(self, chosen):
        self.families = list(dict.fromkeys(contest.family for contest, _ in chosen))
        self.left = sum(contest.seconds * rounds for contest, rounds in chosen)
        self.started = time.monotonic()

    def show(self, contest, i, rounds):
        place = f"{self.families.index(contest.family) + 1} of {len(self.families)}"
        elapsed = time.monotonic() - self.started
        print(
            f"== family {place}: {contest.family} on {contest.device}, round {i + 1} of {rounds}; "
            f"{minutes(elapsed)} gone, about {minutes(self.left)} to go",
            flush=True,
        )
        self.left -= contest.seconds


def minutes(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


# ---- Printing --------------------------------------------------------------


def cells_of(row):
    used = row.get("peers_mfu", {})
    cells = [row["name"], f"{number(row['ours'])} {row['unit']}{results.mfu_text(row.get('mfu'))}"]
    peers = [
        f"{peer} {number(value)} ({number(results.times_as_fast(row, value))}x{results.mfu_text(used.get(peer))})"
        for peer, value in row["peers"].items()
    ]
    cells.append(", ".join(peers))
    limit = ""
    if "limit" in row:
        unresolved = f", spreads by {row['limit_spread']:.0%}" if row["limit_spread"] > 0.2 else ""
        limit = f"limit {number(row['limit'])} ({results.times_as_fast(row, row['limit']):.0%}{unresolved})"
    return cells + [limit, f"spread {row['spread']:.0%}"]


def print_table(rows):
    table = [cells_of(row) for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip(), flush=True)


# ---- Main ------------------------------------------------------------------


def choose(args):
    """(contest, rounds), with the commands that were asked for."""
    known = contests(os.path.abspath(args.build))
    families = {contest.family for contest in known}
    wanted = set(args.only.split(",")) if args.only else families
    if wanted - families:
        sys.exit(f"there is no family {', '.join(sorted(wanted - families))}; choose of: {', '.join(sorted(families))}")
    if args.device == "cuda" and not results.has_gpu():
        sys.exit("--device cuda: there is no GPU here (no /dev/nvidiactl)")
    devices = [args.device] if args.device else ["cpu", "cuda"] if results.has_gpu() else ["cpu"]
    chosen = []
    for contest in known:
        if contest.family not in wanted or contest.device not in devices:
            continue
        if args.without_peers:
            contest.commands = [command for command in contest.commands if not is_peer(command)]
        if args.quick:
            contest.commands = [command + ["--quick"] for command in contest.commands[: contest.brief]]
        chosen.append((contest, 1 if args.quick else args.rounds or contest.rounds))
    if not chosen:
        sys.exit(f"none of {', '.join(sorted(wanted))} runs on {args.device}")
    return chosen


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build/release", help="where the programs are")
    parser.add_argument("--only", default="", help="families, with commas between them")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: all that there are")
    parser.add_argument("--rounds", type=int, help="how often commands take turns")
    parser.add_argument("--out", default=str(RESULTS), help="rows of other families in it stay, unless all are run")
    parser.add_argument("--quick", action="store_true", help="everything once and short: does it run?")
    parser.add_argument("--without-peers", action="store_true", help="leave the Python programs out")
    return parser.parse_args()


def command_line(args):
    """The command that repeats such a run, without its output file."""
    words = ["python3", "bench/run.py"]
    for option in ("only", "device", "rounds"):
        if getattr(args, option):
            words += [f"--{option}", str(getattr(args, option))]
    return " ".join(words + ["--without-peers"] * args.without_peers + ["--quick"] * args.quick)


def main():
    args = parse()
    chosen = choose(args)
    # A run of everything starts the file anew; others replace their rows.
    is_part = args.only or args.device or args.without_peers
    earlier = results.load(args.out) if is_part and os.path.exists(args.out) else []
    run = results.describe_run(args.build, command_line(args), args.quick)
    print(", ".join(f"{key} {value}" for key, value in run.items()))
    progress = Progress(chosen)
    rows, failures = [], []
    for contest, rounds in chosen:
        try:
            own = run_contest(contest, rounds, lambda i: progress.show(contest, i, rounds))
        except Failed as failure:
            failures.append(str(failure))
            print(f"FAILED: {failure}", flush=True)
            continue
        if "gpu" in run:
            for row in own:
                mfu.add_to(row, run["gpu"]["name"])
        print_table(own)
        rows += own
    if rows:
        measured = {row["name"] for row in rows}
        kept = results.keep(earlier, lambda row: row["name"] not in measured)
        results.write(args.out, [*kept, (run, rows)])
        print("\n(Nx): how many times faster than the peer; (N%): share of the limit's speed")
        print_table(rows)
        print(f"{len(rows)} rows in {os.path.relpath(args.out)}, {minutes(time.monotonic() - progress.started)}")
    if failures:
        sys.exit("failed:\n  " + "\n  ".join(failures))


if __name__ == "__main__":
    main()
