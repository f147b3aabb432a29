#!/usr/bin/env python3
"""Compares the parity tests that ran with the list of PyTorch's.

Usage: check_parity.py CHECKLIST XML REPORT SEED...

CHECKLIST has a line for each test: id (seed-number), suite, test, leaf_runs.
XML is what the test binary wrote. For the named seeds every test must be there,
must have passed, and must have made exactly its leaf runs. REPORT gets a test
case for each, as JUnit XML.
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


def write_report(path, results):
    """results: name -> problem, or None."""
    suite = ElementTree.Element("testsuite", name="parity_checklist")
    for name, problem in results.items():
        case = ElementTree.SubElement(
            suite, "testcase", classname="parity_checklist", name=name,
            status="run", result="completed", time="0")
        if problem:
            ElementTree.SubElement(case, "failure", message=problem)
    failures = sum(problem is not None for problem in results.values())
    suite.set("tests", str(len(results)))
    suite.set("failures", str(failures))
    root = ElementTree.Element("testsuites", tests=str(len(results)), failures=str(failures))
    root.append(suite)
    ElementTree.ElementTree(root).write(path, encoding="UTF-8", xml_declaration=True)


def problem_of(row, found):
    if not found:
        return "did not run"
    if not all(passed for _, passed in found):
        return "failed"
    runs = sum(count for count, _ in found)
    if runs != int(row["leaf_runs"]):
        return f'{runs} leaf runs, expected {row["leaf_runs"]}'
    return None


def main():
    checklist, xml, report, *seeds = sys.argv[1:]
    cases = cases_of(xml)
    with open(checklist, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["id"][:3] in seeds]
    results, leaves = {}, 0
    for row in rows:
        found = cases.get((row["suite"], row["test"]), [])
        name = f'{row["id"]} {row["suite"]}.{row["test"]}'
        results[name] = problem_of(row, found)
        leaves += sum(count for count, _ in found)
        if results[name]:
            print(f"{name}: {results[name]}")
    write_report(report, results)
    good = sum(problem is None for problem in results.values())
    print(f"check_parity: seeds {' '.join(seeds)}: {good} of {len(rows)} tests, "
          f"{leaves} leaf runs")
    return 0 if rows and good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
