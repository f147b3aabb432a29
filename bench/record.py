#!/usr/bin/env python3
"""Writes docs/performance.md from the records of benchmark runs.

    bench/record.py                  regenerates the document
    bench/record.py --check          fails if that would change it
    bench/record.py --take FILE      makes FILE, which bench/run.py wrote, the record
                                     of its kind of machine first: cpu, or h200 where
                                     there was a GPU

Records are bench/records/*.jsonl. The text is bench/records/performance.md.in, in
which {{runs}} becomes a table of the runs, and {{table RECORD PATTERN...}} one of the
rows whose names match a pattern. What stands between {{if RECORD PATTERN...}} and
{{end}} is there if the record has such rows. Every row of every record is in a table.
"""

import argparse
import difflib
import fnmatch
import pathlib
import re
import sys

import results
from results import number
from run import contests

RECORDS = results.ROOT / "bench" / "records"
TEMPLATE = RECORDS / "performance.md.in"
DOCUMENT = results.ROOT / "docs" / "performance.md"
UNSTEADY = 0.2  # a limit that spreads by more says little

PEERS = {
    "adamw": "AdamW",
    "compile": "torch.compile, bfloat16",
    "compile_autocast": "torch.compile, autocast",
    "compile_graphs": "torch.compile, CUDA graphs",
    "ddp": "Python DDP",
    "dcp": "Python's dcp",
    "fsdp1": "Python FSDP1",
    "eager": "Python, eager",
    "fsdp2": "Python FSDP2",
    "fsdp2_compile": "Python FSDP2, compiled blocks",
    "gather_all": "gathering all",
    "gloo": "Gloo",
    "openmpi": "OpenMPI",
    "libtorch": "LibTorch",
    "logits": "by logits",
    "plan": "predicted",
    "python": "Python",
    "python_fused": "Python, fused",
    "whole": "sent whole",
    "zero": "Python ZeRO",
}


def markdown_table(header, lines):
    def line(cells):
        return "| " + " | ".join(cells) + " |"

    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join(line(cells) for cells in [header, rule, *lines])


# ---- Runs ------------------------------------------------------------------


def machine(run):
    parts = [run["cpu"], f"{run['cores']} cores", f"{run['memory_gib']} GiB", run["os"]]
    if "gpu" in run:
        gpu = run["gpu"]
        parts.insert(0, f"{gpu['name']} (driver {gpu['driver']}, CUDA {gpu['cuda']})")
    return ", ".join(parts)


def runs_table(records):
    """One line per run, with the families it measured."""
    lines = []
    for name, sections in records.items():
        for run, rows in sections:
            families = dict.fromkeys(results.family_of(row["name"]) for row in rows)
            versions = f"Tessera {run['tessera']} ({run['commit']}), LibTorch {run['libtorch']}, {run['compiler']}"
            what = f"`{run['command']}`: {', '.join(families)}"
            if "note" in run:
                what += f". {run['note']}"
            lines.append([f"{name}, {run['date']}", machine(run), versions, what])
    header = ["record", "machine", "versions", "command and families"]
    return markdown_table(header, lines).replace("---:", "---")


# ---- Rows ------------------------------------------------------------------


def peer_cell(row, peer):
    if peer not in row["peers"]:
        return ""
    value = row["peers"][peer]
    used = results.mfu_text(row.get("peers_mfu", {}).get(peer))
    return f"{number(value)} ({number(results.times_as_fast(row, value))}x{used})"


def limit_cell(row):
    if "limit" not in row:
        return ""
    share = f"{results.times_as_fast(row, row['limit']):.0%}".replace("%", " %")
    unsteady = ", unsteady" if row.get("limit_spread", 0) > UNSTEADY else ""
    return f"{number(row['limit'])} ({share}{unsteady})"


def spread_cell(row):
    return f"{row['spread']:.0%}".replace("%", " %") if row["repeats"] > 1 else ""


def rows_table(rows):
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    has_limit = any("limit" in row for row in rows)
    unnamed = [peer for peer in peers if peer not in PEERS]
    if unnamed:
        sys.exit(f"{rows[0]['name']} has peers without a name for readers: add {', '.join(unnamed)} to PEERS")
    header = ["", "ours", *(PEERS[peer] for peer in peers), *["limit"] * has_limit, "spread"]
    lines = []
    for row in rows:
        cells = [f"`{row['name']}`", f"{number(row['ours'])} {row['unit']}{results.mfu_text(row.get('mfu'))}"]
        cells += [peer_cell(row, peer) for peer in peers]
        cells += [limit_cell(row)] * has_limit + [spread_cell(row)]
        lines.append(cells)
    return markdown_table(header, lines)


def matching(sections, patterns):
    rows = [row for _, rows in sections for row in rows]
    return [row for pattern in patterns for row in rows if fnmatch.fnmatch(row["name"], pattern)]


# ---- The document ----------------------------------------------------------


def without_empty_parts(template, records):
    """Leaves out what is about rows that no record has."""

    def replace(match):
        record, *patterns = match[1].split()
        return "\n" + match[2] if matching(records.get(record, []), patterns) else ""

    return re.sub(r"\n\{\{if (.*?)\}\}\n(.*?)\{\{end\}\}\n", replace, template, flags=re.S)


def fill(template, records):
    used = set()

    def replace(match):
        verb, *words = match[1].split()
        if verb == "runs":
            return runs_table(records)
        if verb != "table" or len(words) < 2:
            sys.exit(f"{TEMPLATE}: {match[0]} is neither {{{{runs}}}} nor {{{{table RECORD PATTERN...}}}}")
        record, *patterns = words
        if record not in records:
            sys.exit(f"{TEMPLATE}: {match[0]}: there is no record bench/records/{record}.jsonl")
        rows = matching(records[record], patterns)
        used.update((record, row["name"]) for row in rows)
        return rows_table(rows) if rows else "*Not measured yet: no row of the record is of this kind.*"

    document = re.sub(r"\{\{(.*?)\}\}", replace, without_empty_parts(template, records))
    for record, sections in records.items():
        unused = [row["name"] for row in matching(sections, ["*"]) if (record, row["name"]) not in used]
        if unused:
            sys.exit(f"{TEMPLATE} has no table for these rows of the record {record}: {', '.join(unused)}")
    return document


def load_records():
    return {path.stem: results.load(path) for path in sorted(RECORDS.glob("*.jsonl"))}


def machine_of(run):
    """What the record of a run's machine is called: "cpu", or its GPU, as in "h200"."""
    if "gpu" not in run:
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", run["gpu"]["name"].lower().removeprefix("nvidia ")).strip("-")


def take(path, records):
    """Puts results into the record of their kind of machine, in memory, and returns the
    record's name. What the record has of other families stays."""
    sections = results.load(path)
    if any("quick" in run for run, _ in sections):
        sys.exit(f"{path} is of a --quick run, whose figures say nothing. Run bench/run.py without it.")
    name = machine_of(sections[0][0])
    families = {results.family_of(row["name"]) for row in matching(sections, ["*"])}
    kept = results.keep(records.get(name, []), lambda row: results.family_of(row["name"]) not in families)
    records[name] = [*kept, *sections]
    return name


def check(document):
    found = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    if found == document:
        return
    sys.stdout.writelines(
        difflib.unified_diff(
            found.splitlines(True), document.splitlines(True), "docs/performance.md", "what the records give"
        )
    )
    sys.exit("docs/performance.md is not what bench/records gives: run bench/record.py, and edit only the template")


def self_test():
    """Medians are of all rounds, tables have what rows have, and templates can be wrong."""
    assert machine_of({"cpu": "AMD"}) == "cpu"
    assert machine_of({"gpu": {"name": "NVIDIA H200"}}) == "h200"
    assert machine_of({"gpu": {"name": "NVIDIA A100-SXM4-80GB"}}) == "a100-sxm4-80gb"
    samples = {"name": "a/b", "unit": "ms", "ours": [1, 4, 2], "peers": {"gloo": [6, 2]}, "limit": [1, 3]}
    row = results.summarize(samples)
    assert (row["ours"], row["spread"], row["repeats"]) == (2, 1.5, 3), row
    assert (row["peers"], row["limit"], row["limit_spread"]) == ({"gloo": 4}, 2, 1), row
    rows = [
        {"name": "a/b", "unit": "ms", "ours": 2.0, "repeats": 3, "spread": 0.25,
         "peers": {"gloo": 5.0}, "limit": 1.0, "limit_spread": 0.5},
        {"name": "a/c", "unit": "MB", "ours": 1234.5, "repeats": 1, "spread": 0, "peers": {}},
    ]  # fmt: skip
    table = fill("{{table cpu a/*}}", {"cpu": [({}, rows)]})
    expected = [
        "|  | ours | Gloo | limit | spread |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| `a/b` | 2.00 ms | 5.00 (2.50x) | 1.00 (50 %, unsteady) | 25 % |",
        "| `a/c` | 1234 MB |  |  |  |",
    ]
    assert table.split("\n") == expected, table
    absent = "\n{{if gpu a/*}}\n{{table gpu a/*}}\n{{end}}\n\n{{if cpu b/*}}\nb\n{{end}}\n"
    assert fill(absent + "\n{{if cpu a/*}}\n{{table cpu a/*}}\n{{end}}\n", {"cpu": [({}, rows)]}) == f"\n{table}\n"
    for template in ("{{tabel cpu a/*}}", "{{table gpu a/*}}", "{{table cpu a/b}}", "{{if cpu a/*}}\n", "{{end}}\n"):
        try:
            fill(template, {"cpu": [({}, rows)]})
        except SystemExit:
            continue
        raise AssertionError(f"{template} was taken")
    self_test_of_families()


def self_test_of_families():
    """Of what bench/run.py can measure, a record can be made."""
    text = TEMPLATE.read_text()
    for device, record in (("cpu", "cpu"), ("cuda", "h200")):
        patterns = [word for table in re.findall(rf"\{{\{{table {record} (.*?)\}}\}}", text) for word in table.split()]
        shown = {results.family_of(pattern) for pattern in patterns}
        measured = {contest.family for contest in contests("build") if contest.device == device}
        assert measured <= shown, f"{TEMPLATE} has no table of {record} for {measured - shown}"
    programs = [*TEMPLATE.parents[1].glob("*_bench.cpp")]
    peers = {peer for program in programs for peer in re.findall(r'peers\["(\w+)"\]', program.read_text())}
    assert "gloo" in peers and peers <= PEERS.keys(), f"PEERS has no name for {peers - PEERS.keys()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the document is old")
    parser.add_argument("--take", metavar="FILE", type=pathlib.Path, help="results to record first")
    parser.add_argument("--self-test", action="store_true", help="see that this program can fail")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    records = load_records()
    taken = take(args.take, records) if args.take else None
    document = fill(TEMPLATE.read_text(), records)  # fails before anything is written
    if args.check:
        return check(document)
    if taken:
        results.write(RECORDS / f"{taken}.jsonl", records[taken])
        print(f"{args.take} is now in the record {taken}")
    DOCUMENT.write_text(document)
    print(f"wrote {DOCUMENT.relative_to(results.ROOT)}")


if __name__ == "__main__":
    main()
