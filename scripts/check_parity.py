#!/usr/bin/env python3
"""Compares the parity tests that ran with the list of PyTorch's.

Usage: check_parity.py CHECKLIST XML SEED...

CHECKLIST has a line for each test: id (seed-number), suite, test, leaf_runs.
XML is what the test binary wrote. For the named seeds every test must be there,
must have passed, and must have made exactly its leaf runs.
"""
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


def main():
    checklist, xml, *seeds = sys.argv[1:]
    cases = cases_of(xml)
    problems, tests, leaves = [], 0, 0
    with open(checklist, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["id"][:3] in seeds]
    for row in rows:
        found = cases.get((row["suite"], row["test"]))
        name = f'{row["id"]} {row["suite"]}.{row["test"]}'
        if not found:
            problems.append(f"{name}: did not run")
            continue
        runs = sum(count for count, _ in found)
        if not all(passed for _, passed in found):
            problems.append(f"{name}: failed")
        if runs != int(row["leaf_runs"]):
            problems.append(f'{name}: {runs} leaf runs, expected {row["leaf_runs"]}')
        tests += 1
        leaves += runs
    for problem in problems:
        print(problem)
    print(f"check_parity: seeds {' '.join(seeds)}: {tests} of {len(rows)} tests, "
          f"{leaves} leaf runs")
    return 1 if problems or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
