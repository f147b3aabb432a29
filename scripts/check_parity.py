#!/usr/bin/env python3
"""Compares the parity tests that ran with the list of PyTorch's.

Usage: check_parity.py CHECKLIST XML REPORT SEED... [--not-yet ID...]

CHECKLIST has a line for each test: id (seed-number), suite, test, leaf_runs.
XML is what the test binary wrote. For the named seeds every test must be there,
must have passed, and must have made exactly its leaf runs. REPORT gets a test
case for each, as JUnit XML.

IDs after --not-yet are tests that are not written. They are named in the summary;
one that did run, or is of no named seed, is an error, so that the list cannot go
stale. IDs with an X are tests that the lists of
PyTorch's tests leave out: checked in the same way, counted apart.
"""
import argparse
import csv
import sys
import xml.etree.ElementTree as ElementTree


def cases_of(path):
    """(suite, test) -> list of (leaf runs, passed); instances of one
    parametrized test count together."""
    cases = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        suite = case.get("classname").split("/")[-1]
        test = case.get("name").split("/")[0]
        runs = 0
        for item in case.iter("property"):
            if item.get("name") == "leaf_runs":
                runs += int(item.get("value"))
        ran = case.get("status") == "run" and case.get("result") == "completed"
        passed = ran and case.find("failure") is None
        cases.setdefault((suite, test), []).append((runs, passed))
    return cases


class Row:
    """A line of the checklist and what became of it."""

    def __init__(self, line, cases, not_yet):
        self.id = line["id"]
        self.name = f'{line["id"]} {line["suite"]}.{line["test"]}'
        self.is_extra = "X" in line["id"]
        self.is_missing = line["id"] in not_yet
        found = cases.get((line["suite"], line["test"]), [])
        self.runs = sum(count for count, _ in found)
        self.problem = self.problem_of(int(line["leaf_runs"]), found)

    def problem_of(self, expected, found):
        if self.is_missing:
            return "did run: take it off the list of --not-yet" if found else None
        if not found:
            return "did not run"
        if not all(passed for _, passed in found):
            return "failed"
        if self.runs != expected:
            return f"{self.runs} leaf runs, expected {expected}"
        return None

    def is_good(self):
        return self.problem is None and not self.is_missing


def write_report(path, rows):
    suite = ElementTree.Element("testsuite", name="parity_checklist")
    rows = [row for row in rows if row.problem or not row.is_missing]
    for row in rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname="parity_checklist", name=row.name,
            status="run", result="completed", time="0")
        if row.problem:
            ElementTree.SubElement(case, "failure", message=row.problem)
    failures = sum(row.problem is not None for row in rows)
    suite.set("tests", str(len(rows)))
    suite.set("failures", str(failures))
    root = ElementTree.Element("testsuites", tests=str(len(rows)), failures=str(failures))
    root.append(suite)
    ElementTree.ElementTree(root).write(path, encoding="UTF-8", xml_declaration=True)


def summary_of(seed, rows):
    listed = [row for row in rows if not row.is_extra]
    extra = [row for row in rows if row.is_extra]
    text = (f"check_parity: {seed}: {sum(row.is_good() for row in listed)} of "
            f"{len(listed)} tests, {sum(row.runs for row in listed)} leaf runs")
    if extra:
        text += f"; extra: {sum(row.is_good() for row in extra)} of {len(extra)}"
    missing = [row.name for row in rows if row.is_missing]
    if missing:
        text += f"; not written yet: {', '.join(missing)}"
    return text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checklist")
    parser.add_argument("xml")
    parser.add_argument("report")
    parser.add_argument("seeds", nargs="+")
    parser.add_argument("--not-yet", nargs="+", default=[])
    args = parser.parse_args()

    cases = cases_of(args.xml)
    with open(args.checklist, newline="") as file:
        rows = [Row(line, cases, args.not_yet) for line in csv.DictReader(file)
                if line["id"][:3] in args.seeds]
    write_report(args.report, rows)
    ok = True
    for row in rows:
        if row.problem:
            print(f"{row.name}: {row.problem}")
            ok = False
    for name in set(args.not_yet) - {row.id for row in rows}:
        print(f"--not-yet {name}: no such test in seeds {' '.join(args.seeds)}")
        ok = False
    for seed in args.seeds:
        mine = [row for row in rows if row.id[:3] == seed]
        print(summary_of(seed, mine))
        ok = ok and any(row.is_good() for row in mine)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
