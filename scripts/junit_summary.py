#!/usr/bin/env python3
"""Sums up the JUnit XML files of a test run.

    junit_summary.py FOLDER [--ctest FILE]
        Prints failed tests, skipped ones with their reasons, and as the last
        line `N passed, N failed[, N skipped]`. Fails if a test failed, was
        skipped for a reason that is not in MAY_SKIP, or if there is nothing to
        count. FILE is what `ctest --output-junit` wrote:
        each of its tests must have left FOLDER/<test>.xml, so that one that
        crashed before writing is not missed.

    junit_summary.py FOLDER --add PHASE [--seconds S] [--failed LOG]
        Writes FOLDER/PHASE.xml for a step that is no test program.
"""

import argparse
import os
import pathlib
import re
import sys
import xml.etree.ElementTree as ET
from typing import NamedTuple

LOG_TAIL_CHARS = 20000

# What a host may lack. Everything else is installed by scripts/setup.sh.
MAY_SKIP = (
    "namespaces cannot be made here",
    "another user cannot be played here",
    "this LibTorch came without Python",
    "there is a device for each rank",
    "only root can be another user",
    "this test wants a CUDA device",
)

# What a host may lack too, and CI (the variable CI is set) may not.
MAY_SKIP_OUTSIDE_CI = (
    "no Slurm here",
    "no MPICH here",
    "no TensorBoard here",
    "no transformers here",
    "Slurm cannot be run here",
    "no axe-core and html-validate here",
    "the user nobody cannot enter the folder of this checkout",
)


class Case(NamedTuple):
    name: str
    outcome: str  # passed, failed or skipped
    reason: str = ""


def reason_of(element):
    text = element.get("message") or element.text or ""
    return " ".join(text.split())[:300]


def read_case(case):
    name = ".".join(filter(None, [case.get("classname"), case.get("name")]))
    for tag in ("failure", "error"):
        found = case.find(tag)
        if found is not None:
            return Case(name, "failed", reason_of(found))
    skipped = case.find("skipped")
    if skipped is not None:
        reason = reason_of(skipped) or "no reason given"
        allowed = MAY_SKIP if os.environ.get("CI") else MAY_SKIP + MAY_SKIP_OUTSIDE_CI
        if any(known in reason for known in allowed):
            return Case(name, "skipped", reason)
        return Case(name, "failed", f"skipped, and should not be: {reason}")
    # GoogleTest lists a DISABLED_ test without saying that it was skipped.
    if case.get("status") in ("notrun", "disabled"):
        return Case(name, "failed", "disabled")
    return Case(name, "passed")


def read_file(path):
    try:
        return [read_case(case) for case in ET.parse(path).iter("testcase")]
    except (ET.ParseError, OSError) as error:
        return [Case(path.name, "failed", f"cannot be read as JUnit XML: {error}")]


def check_against_ctest(ctest_file, cases_by_file):
    """Failures that only ctest saw: crashes, time-outs, programs that ran nothing."""
    try:
        programs = list(ET.parse(ctest_file).iter("testcase"))
    except (ET.ParseError, OSError) as error:
        return [Case("ctest", "failed", f"left no readable report: {error}")]
    if not programs:
        return [Case("ctest", "failed", "it has no tests")]
    extra = []
    for program in programs:
        name = program.get("name")
        cases = cases_by_file.get(name + ".xml")
        seen = read_case(program)
        if program.get("status") == "disabled":
            extra.append(Case(name, "failed", "disabled in ctest"))
        elif seen.outcome == "failed":
            if not cases:
                extra.append(Case(name, "failed", f"{seen.reason or 'failed'}; it left no results"))
            elif all(case.outcome != "failed" for case in cases):
                extra.append(Case(name, "failed", f"{seen.reason or 'failed'}, though its tests passed"))
        elif cases is None and seen.outcome == "skipped":
            extra.append(Case(name, "failed", f"did not run: {seen.reason}"))
        elif cases is None:
            extra.append(Case(name, "failed", f"ended well and left no {name}.xml"))
        elif not cases:
            extra.append(Case(name, "failed", "ran no test"))
    return extra


def summarize(folder, ctest_file):
    cases_by_file = {path.name: read_file(path) for path in sorted(folder.glob("*.xml"))}
    cases = [case for group in cases_by_file.values() for case in group]
    if ctest_file:
        cases += check_against_ctest(ctest_file, cases_by_file)
    if not cases:
        cases = [Case(str(folder), "failed", "no test results found")]

    counts = {outcome: 0 for outcome in ("passed", "failed", "skipped")}
    for case in cases:
        counts[case.outcome] += 1
    for outcome in ("skipped", "failed"):
        for case in cases:
            if case.outcome == outcome:
                print(f"{outcome}: {case.name}: {case.reason}")
    line = f"{counts['passed']} passed, {counts['failed']} failed"
    print(line + (f", {counts['skipped']} skipped" if counts["skipped"] else ""))
    return counts["failed"] > 0


def add_phase(folder, phase, seconds, log):
    suite = ET.Element("testsuite", name=phase, tests="1", failures=str(int(log is not None)))
    case = ET.SubElement(suite, "testcase", classname=phase, name=phase, time=f"{seconds:.3f}")
    if log is not None:
        text = log.read_text(errors="replace")[-LOG_TAIL_CHARS:]
        # XML has no way to write control characters.
        text = re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd]", "", text)
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "failed")
        ET.SubElement(case, "failure", message=last).text = text
    folder.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(folder / f"{phase}.xml", encoding="utf-8", xml_declaration=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--ctest", type=pathlib.Path)
    parser.add_argument("--add", metavar="PHASE")
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--failed", type=pathlib.Path, metavar="LOG")
    args = parser.parse_args()
    if args.add:
        return add_phase(args.folder, args.add, args.seconds, args.failed)
    return summarize(args.folder, args.ctest)


if __name__ == "__main__":
    sys.exit(main())
