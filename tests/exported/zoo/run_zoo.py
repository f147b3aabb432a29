#!/usr/bin/env python3
"""Exports models, trains them in C++ on 1, 2 and 4 ranks, and compares with Python.

    run_zoo.py RESULTS.xml --bin BIN --folder FOLDER [--few | --only NAME,...] [--table PAGE.md]

BIN has the programs tessera, exported_zoo and exported_memory. RESULTS.xml gets a test for each check
(JUnit). With --table, the table of PAGE.md between <!-- zoo --> and <!-- /zoo --> is
written anew; that takes all models. Fails if a check fails, or if a model does not export
that is not in NOT_EXPORTED.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import which_python

which_python.with_transformers("exported_zoo_test")

WORLDS = (1, 2, 4)
# What is known not to export, and a word of the reason that must be in the message.
NOT_EXPORTED = {
    "reformer": "attention_seed",
    "switch_transformers": "Couldn't swap",
}


# What cannot run in double in Python either: only compared in float32, at world 1.
NOT_IN_DOUBLE = {
    "xglm": "without overflow",
}
# Models whose blocks cannot be recomputed, and a word of the refusal.
NOT_RECOMPUTED = {
}


# How far planned memory may be from what was measured, as a share of that.
PLANNED_WITHIN = {"saved": 0.01, "peak": 0.10}
# More, where kernels have workspaces beside tensors that are this small, or copy what is not laid out as they want it.
PLANNED_WITHIN_OF = {
    "convnext": {"peak": 0.90},
    "mpnet": {"saved": 0.03},
    "regnet": {"peak": 0.15},
    "resnet": {"peak": 0.25},
    "time_series_transformer": {"saved": 0.15, "peak": 0.15},
    "torch_bags": {"saved": 0.05},
    "torch_fourier": {"peak": 0.30},
    "torch_mobilenet": {"peak": 0.15},
    "torch_s4d": {"saved": 0.05, "peak": 0.25},
    "torch_norms": {"saved": 0.10, "peak": 0.35},
    "whisper": {"peak": 0.15},
}
# Models with an operator that a plan has no rule for: it must name it.
NOT_PLANNED = {
    "torch_cond": "cond",
    "torch_gru_bidirectional": "gru",
    "torch_lstm": "lstm",
    "torch_lstm_cell": "lstm_cell",
    "torch_rnn": "rnn_relu",
}


class Planned:
    """Memory of a step, planned and measured, in bytes: a line of exported_memory."""

    def __init__(self, planned_saved, saved, planned_peak, peak, unknown):
        self.off = {"saved": int(planned_saved) / int(saved) - 1, "peak": int(planned_peak) / int(peak) - 1}
        self.unknown = unknown.split()

    def wrong(self, name):
        """None, or what is wrong."""
        if name in NOT_PLANNED:
            named = any(NOT_PLANNED[name] in operator for operator in self.unknown)
            return None if named else f"all operators are known now: {name} can be taken off NOT_PLANNED"
        if self.unknown:
            return f"no rule for {', '.join(self.unknown)}"
        within = PLANNED_WITHIN | PLANNED_WITHIN_OF.get(name, {})
        far = [f"{what} is off by {100 * off:+.1f} %" for what, off in self.off.items() if abs(off) > within[what]]
        return ", ".join(far) or None

    def text(self):
        return f"no rule for {', '.join(self.unknown)}" if self.unknown else \
            ", ".join(f"{100 * off:+.1f} %".replace("-0.0", "+0.0") for off in self.off.values())


class Results:
    """What became of each model: from zoo.json and the lines of exported_zoo and exported_memory."""

    def __init__(self, folder):
        self.models = json.loads((folder / "zoo.json").read_text())
        self.checks = {line["name"]: {} for line in self.models}  # (world, check) -> outcome
        self.planned = {line["name"]: {} for line in self.models}  # "plain" or "recomputed" -> Planned

    def add(self, world, file):
        for line in file.read_text().splitlines():
            name, check, outcome = line.split("\t", 2)
            self.checks[name][world, check] = outcome

    def add_memory(self, file):
        for line in file.read_text().splitlines():
            name, how, *rest = line.split("\t")
            self.planned[name][how] = Planned(*rest)

    def cases(self):
        """(name, None or what is wrong) of each test."""
        for line in self.models:
            name, why = line["name"], line.get("why")
            if why is not None:
                known = NOT_EXPORTED.get(name)
                yield f"{name}.is_refused", None if known and known in why else f"not exported: {why}"
            elif name in NOT_EXPORTED:
                yield f"{name}.exports", "it exports now: take it off NOT_EXPORTED"
            else:
                why = line.get("why_not_double")
                if why is not None or name in NOT_IN_DOUBLE:
                    known = NOT_IN_DOUBLE.get(name)
                    yield f"{name}.in_double", None if known and why and known in why else f"in double: {why}"
                for world in WORLDS if why is None else WORLDS[:1]:
                    if not any(key[0] == world for key in self.checks[name]):
                        yield f"{name}.{world}_ranks", "it was not run"
                for (world, check), outcome in self.checks[name].items():
                    yield from self.case_of(name, world, check, outcome)
                if not self.planned[name]:
                    yield f"{name}.planned_memory", "it was not planned"
                for how, planned in self.planned[name].items():
                    yield f"{name}.planned_memory_{how}", planned.wrong(name)

    @staticmethod
    def case_of(name, world, check, outcome):
        if check.startswith("recompute") and name in NOT_RECOMPUTED:
            known = NOT_RECOMPUTED[name] in outcome
            yield f"{name}.{world}_ranks.{check}_is_refused", None if known else outcome
        elif outcome != "no blocks":
            yield f"{name}.{world}_ranks.{check}", None if outcome == "ok" else outcome


def run(command, log, quiet=False):
    """Runs it with its output in `log` and, unless quiet, here; returns the exit code."""
    with open(log, "w") as file:
        process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            if not quiet:
                print(line, end="", flush=True)
            file.write(line)
        return process.wait()


def train(options, world, folder, quiet=False):
    """Returns the file of results and the exit code."""
    results = folder / f"results-{world}.txt"
    results.unlink(missing_ok=True)
    code = run([options.bin / "tessera", "run", "-n", world, options.bin / "exported_zoo", folder, results],
               folder / f"run-{world}.log", quiet)
    if not results.exists():
        sys.exit(f"exported_zoo on {world} ranks wrote no results (exit code {code}); see {folder}/run-{world}.log")
    return results, code


def compare_memory(options):
    """Returns the file of results, and None or what is wrong."""
    results = options.folder / "memory.txt"
    results.unlink(missing_ok=True)
    log = options.folder / "memory.log"
    code = run([options.bin / "exported_memory", options.folder, results], log)
    return results, None if code == 0 else f"exported_memory failed; see {log}"


def show_plans_able_to_fail():
    """A plan that is off by more than it may be must be noticed."""
    wrong = [Planned(98, 100, 100, 100, ""), Planned(100, 100, 111, 100, ""), Planned(100, 100, 100, 100, "odd")]
    missed = [planned.off for planned in wrong if planned.wrong("a model") is None]
    return f"not noticed: {missed}" if missed else None


def show_able_to_fail(options, results):
    """A reference with one number changed must be noticed by every check."""
    name = next(line["name"] for line in results.models if "why" not in line)
    folder = options.folder / "wrong"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(options.folder / name, folder / name)
    (folder / "models.txt").write_text(f"{name}\n")
    for file in (folder / name).glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 1  # the last tensor's last number: a loss, or an output of eval()
        file.write_bytes(raw)
    file, code = train(options, 1, folder, quiet=True)
    outcomes = [line.split("\t")[2] for line in file.read_text().splitlines()]
    shutil.rmtree(folder)
    return None if code != 0 and outcomes and not {"ok", "no blocks"} & set(outcomes) else f"a wrong reference was not noticed: {outcomes}"


def write_junit(path, cases, seconds):
    suite = ET.Element("testsuite", name="exported_zoo_test", time=f"{seconds:.1f}")
    for name, wrong in cases:
        case = ET.SubElement(suite, "testcase", classname="ExportedZoo", name=name)
        if wrong:
            ET.SubElement(case, "failure", message=wrong).text = wrong
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--table", type=pathlib.Path, help="page whose table is written anew")
    parser.add_argument("--resume", action="store_true", help="keep what is exported already")
    options = parser.parse_args()
    if options.table and (options.few or options.only):
        parser.error("--table takes all models")
    began = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    chosen = ["--few"] if options.few else ["--only", options.only] if options.only else []
    chosen += ["--resume"] if options.resume else []
    if run([sys.executable, HERE / "export_zoo.py", options.folder, *chosen], options.folder / "export.log") != 0:
        sys.exit(f"export_zoo.py failed; see {options.folder}/export.log")
    exported = time.monotonic()
    results = Results(options.folder)
    for world in WORLDS:
        results.add(world, train(options, world, options.folder)[0])
    memory, wrong = compare_memory(options)
    results.add_memory(memory)
    cases = [*results.cases(), ("every_plan_is_made", wrong), ("a_wrong_reference_is_noticed", show_able_to_fail(options, results)),
             ("a_wrong_plan_is_noticed", show_plans_able_to_fail())]
    seconds = time.monotonic() - began
    write_junit(options.results, cases, seconds)
    failed = [case for case in cases if case[1]]
    for name, wrong in failed:
        print(f"FAILED {name}: {wrong}")
    print(f"{len(results.models)} models, {len(cases)} checks, {len(failed)} failed; {(exported - began) / 60:.1f} minutes to "
          f"export, {(seconds - exported + began) / 60:.1f} to train")
    if options.table:
        import zoo_table

        zoo_table.write(options.table, results, seconds)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
