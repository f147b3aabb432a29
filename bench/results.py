"""Files of results: lines of JSON, a run and then the rows that it measured.

    {"run": {"date": "2026-11-15", "cpu": "AMD EPYC", "cores": 2, ...}}
    {"name": "step/gpt-tiny/cpu2", "unit": "ms", "ours": 76.1, ...}

See bench/README.md for the fields.
"""

import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


# ---- The machine -----------------------------------------------------------


def describe_run(build, command, is_quick):
    """Everything that figures depend on."""
    tessera, libtorch = re.fullmatch(
        r"tessera (\S+) \(LibTorch (\S+)\)", output_of([f"{build}/bin/tessera", "--version"])
    ).groups()
    run = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "os": os_name(),
        "compiler": compiler(build),
        "libtorch": libtorch,
        "tessera": tessera,
        "commit": commit(),
    }
    if has_gpu():
        run["gpu"] = gpu(build)
    if is_quick:
        run["quick"] = True
    return run


def recorded(name):
    """What set-up left in build/; empty if it did not run."""
    file = ROOT / "build" / name
    return file.read_text().strip() if file.exists() else ""


def output_of(command):
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def os_name():
    return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())


def cached(build, variable):
    """What CMake took for a variable."""
    return re.search(rf"^{variable}:\w+=(.*)$", (ROOT / build / "CMakeCache.txt").read_text(), re.M)[1]


def compiler(build):
    program = cached(build, "CMAKE_CXX_COMPILER")
    name = "clang++" if "clang" in os.path.realpath(program) else "g++"
    return f"{name} {output_of([program, '-dumpfullversion', '-dumpversion'])}"


def commit():
    """With a plus sign if files differ from the commit. TESSERA_COMMIT names the commit of
    a copy that git here does not know."""
    told = os.environ.get("TESSERA_COMMIT", "")
    if told or not (ROOT / ".git").exists() or shutil.which("git") is None:
        return told or "unknown"
    is_changed = output_of(["git", "status", "--porcelain"]) != ""
    return output_of(["git", "rev-parse", "--short=10", "HEAD"]) + ("+" if is_changed else "")


def has_gpu():
    return os.path.exists("/dev/nvidiactl")


def gpu(build):
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    name, driver, memory = output_of(query).splitlines()[0].split(", ")
    version = pathlib.Path(cached(build, "TESSERA_TORCH_ROOT")) / "version.py"
    cuda = re.search(r"^cuda\b.*?['\"]([\d.]+)", version.read_text(), re.M) if version.is_file() else None
    return {"name": name, "driver": driver, "memory": memory, "cuda": cuda[1] if cuda else "unknown"}


# ---- Rows ------------------------------------------------------------------


def spread(samples):
    middle = statistics.median(samples)
    return round((max(samples) - min(samples)) / middle, 3) if middle > 0 else 0.0


def rounded(value):
    return float(f"{value:.4g}")


def summarize(samples):
    """Samples of all rounds -> the row that is kept."""
    row = {
        "name": samples["name"],
        "unit": samples["unit"],
        "ours": rounded(statistics.median(samples["ours"])),
        "spread": spread(samples["ours"]),
        "repeats": len(samples["ours"]),
        "peers": {peer: rounded(statistics.median(own)) for peer, own in samples["peers"].items()},
        "peers_spread": {peer: spread(own) for peer, own in samples["peers"].items()},
    }
    if samples.get("limit"):
        row["limit"] = rounded(statistics.median(samples["limit"]))
        row["limit_spread"] = spread(samples["limit"])
    return row


def times_as_fast(row, other):
    """How many times faster ours is than `other` of the same unit; for memory, how
    many times smaller."""
    return other / row["ours"] if row["ours"] > 0 else float("inf")


def mfu_text(share):
    """What stands behind a time; nothing where the share is not known."""
    return "" if share is None else f", MFU {share:.0%}".replace("%", " %")


def number(value):
    """For readers: three digits, more for large ones."""
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def family_of(name):
    """The family that a row belongs to."""
    first = name.split("/")[0]
    return "ddp" if first in ("zero", "zero_overlap") else first


# ---- Files -----------------------------------------------------------------


def load(path):
    """[(run, [row, ...]), ...]"""
    sections = []
    for number, line in enumerate(pathlib.Path(path).read_text().splitlines(), 1):
        value = json.loads(line)
        if "run" in value:
            sections.append((value["run"], []))
        elif sections:
            sections[-1][1].append(value)
        else:
            sys.exit(f"{path}:{number}: a row, but no run yet: no file of this bench/run.py. Move it away.")
    return sections


def write(path, sections):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for run, rows in sections:
            file.writelines(json.dumps(value) + "\n" for value in [{"run": run}, *rows])


def keep(sections, is_kept):
    """Keeps the rows for which it returns true; drops runs without rows."""
    kept = [(run, [row for row in rows if is_kept(row)]) for run, rows in sections]
    return [(run, rows) for run, rows in kept if rows]
