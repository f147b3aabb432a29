#!/usr/bin/env python3
"""Compares the parity tests that ran with the list of PyTorch's.

Usage: check_parity.py CHECKLIST XML REPORT SEED... --device cpu|cuda
           [--sources FOLDER] [--record FILE --on WHERE --command COMMAND]
       check_parity.py --self-test

CHECKLIST has a line for each test: id (seed-number), suite, test, leaf_runs (how
many runs PyTorch's test expands into), device, leaves. `leaves` names these runs:
"{not ,}recurse {not ,}half;all" stands for five. XML is what the test program
wrote. For the named seeds every test must be there, must have passed, and must
have made exactly the runs of that name, on its device: that of --device, or the
one that the line names. REPORT gets a test case for each, as JUnit XML.

A test that wants a CUDA device counts as not run where there is none, and is
named. With --device cuda that is an error.

No test stands for two: two tests may not have the same body, which is read in
FOLDER, unless their runs have different names or devices.

IDs with an X are tests that the lists of PyTorch's tests leave out: checked in
the same way, counted apart. FILE gets a table of the outcome with the day, WHERE
(device and versions) and COMMAND, unless something is wrong.
"""
import argparse
import collections
import csv
import datetime
import itertools
import pathlib
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree


def expand(pattern):
    """The names that a pattern with {a,b} stands for."""
    parts = [part.split(",") if i % 2 else [part]
             for i, part in enumerate(re.split(r"\{([^}]*)\}", pattern))]
    return ["".join(choice) for choice in itertools.product(*parts)]


def leaves_of(line):
    """The names of the leaf runs that a line of the checklist wants."""
    names = [" ".join(name.split()) for pattern in line["leaves"].split(";")
             for name in expand(pattern)]
    if len(names) != int(line["leaf_runs"]) or len(set(names)) != len(names):
        raise ValueError(f'{line["id"]}: "leaves" names {len(set(names))} runs, '
                         f'leaf_runs says {line["leaf_runs"]}')
    return names


def body_of(source, first_line):
    """A test's body without its name, comments and layout."""
    lines = source.splitlines()[first_line - 1:]
    end = next(i for i, line in enumerate(lines) if line == "}")
    text = re.sub(r"//[^\n]*", "", "\n".join(lines[:end]))
    return " ".join(text[text.index("{") + 1:].split())


class Case:
    """What the report says of a test."""

    def __init__(self, case, sources):
        properties = {item.get("name"): item.get("value")
                      for item in case.iter("property")}
        self.leaves = [" ".join(name.split()) for name
                       in properties.get("leaves", "").split(";")[:-1]]
        self.device = properties.get("device", "no")
        self.seconds = float(case.get("time", 0))
        self.was_skipped = case.get("result") == "skipped"
        self.passed = (case.get("status") == "run" and
                       case.get("result") == "completed" and
                       case.find("failure") is None)
        self.body = None
        if sources is not None:
            file = sources / pathlib.Path(case.get("file")).name
            self.body = body_of(file.read_text(), int(case.get("line")))


def cases_of(path, sources):
    """(suite, test) -> Case."""
    cases = {}
    for element in ElementTree.parse(path).getroot().iter("testcase"):
        key = (element.get("classname"), element.get("name"))
        cases[key] = Case(element, sources)
    return cases


class Row:
    """A line of the checklist and what became of it."""

    def __init__(self, line, cases, device):
        self.id = line["id"]
        self.test = f'{line["suite"]}.{line["test"]}'
        self.name = f"{self.id} {self.test}"
        self.is_extra = "X" in self.id
        self.case = cases.get((line["suite"], line["test"]))
        self.device = line["device"] or device
        self.lacks_device = (self.device != device and device == "cpu" and
                             self.case is not None and self.case.was_skipped)
        self.problem = self.problem_of(leaves_of(line))

    def problem_of(self, expected):
        case = self.case
        if case is None:
            return "did not run"
        if self.lacks_device:
            return None
        if case.was_skipped:
            return "was skipped"
        if not case.passed:
            return "failed"
        if case.device != self.device:
            return f"ran on {case.device}, expected {self.device}"
        given = collections.Counter(case.leaves)
        wanted = collections.Counter(expected)
        if given != wanted:
            missing = sorted((wanted - given).elements())
            unknown = sorted((given - wanted).elements())
            return (f"{len(case.leaves)} leaf runs, expected {len(expected)}; "
                    f"missing: {missing}; not in the list: {unknown}")
        return None

    def is_good(self):
        return self.problem is None and not self.lacks_device

    def num_runs(self):
        return len(self.case.leaves) if self.is_good() else 0

    def result(self):
        if self.lacks_device:
            return f"not run: wants {self.device}"
        return self.problem or "passed"


def find_doubles(rows):
    """Marks rows whose runs are another row's: body, name and device."""
    first = {}
    for row in rows:
        if not row.is_good() or row.case.body is None:
            continue
        for leaf in row.case.leaves:
            other = first.setdefault((row.case.body, leaf, row.device), row)
            if other is not row and row.problem is None:
                row.problem = f'leaf run "{leaf}" has the body of {other.name}'


def write_report(path, rows):
    suite = ElementTree.Element("testsuite", name="parity_checklist")
    for row in rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname="parity_checklist", name=row.name,
            status="run", result="skipped" if row.lacks_device else "completed", time="0")
        if row.problem:
            ElementTree.SubElement(case, "failure", message=row.problem)
        elif row.lacks_device:
            ElementTree.SubElement(
                case, "skipped", message="this test wants a CUDA device")
    failures = sum(row.problem is not None for row in rows)
    suite.set("tests", str(len(rows)))
    suite.set("failures", str(failures))
    root = ElementTree.Element("testsuites", tests=str(len(rows)), failures=str(failures))
    root.append(suite)
    ElementTree.ElementTree(root).write(path, encoding="UTF-8", xml_declaration=True)


def summary_of(seed, rows, device):
    listed = [row for row in rows if not row.is_extra]
    extra = [row for row in rows if row.is_extra]
    text = (f"check_parity: {seed} on {device}: {sum(row.is_good() for row in listed)} of "
            f"{len(listed)} tests, {sum(row.num_runs() for row in listed)} leaf runs")
    if extra:
        text += f"; extra: {sum(row.is_good() for row in extra)} of {len(extra)}"
    lacking = [row.name for row in rows if row.lacks_device]
    if lacking:
        text += f"; not run, wants a GPU: {', '.join(lacking)}"
    return text


def write_record(path, rows, args):
    listed = [row for row in rows if not row.is_extra]
    lines = [
        f"# Parity on {args.device}",
        "",
        f"{datetime.date.today()}, {args.on}. Written by `{args.command}`.",
        "",
        f"{sum(row.is_good() for row in listed)} of {len(listed)} tests passed, with "
        f"{sum(row.num_runs() for row in listed)} leaf runs.",
        "",
        "| id | test | device | leaf runs | seconds | result |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        lines.append(f"| {row.id} | {row.test} | {row.device} | {row.num_runs()} | "
                     f"{row.case.seconds:.1f} | {row.result()} |")
    pathlib.Path(path).write_text("\n".join(lines) + "\n")


def check(args):
    sources = pathlib.Path(args.sources) if args.sources else None
    cases = cases_of(args.xml, sources)
    with open(args.checklist, newline="") as file:
        rows = [Row(line, cases, args.device) for line in csv.DictReader(file)
                if line["id"][:3] in args.seeds]
    find_doubles(rows)
    write_report(args.report, rows)
    ok = all(row.problem is None for row in rows)
    for row in rows:
        if row.problem:
            print(f"{row.name}: {row.problem}")
    for seed in args.seeds:
        mine = [row for row in rows if row.id[:3] == seed]
        print(summary_of(seed, mine, args.device))
        ok = ok and any(row.is_good() for row in mine)
    if args.record and ok:
        write_record(args.record, rows, args)
    return 0 if ok else 1


def arguments(words):
    parser = argparse.ArgumentParser()
    parser.add_argument("checklist")
    parser.add_argument("xml")
    parser.add_argument("report")
    parser.add_argument("seeds", nargs="+")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--sources")
    parser.add_argument("--record")
    parser.add_argument("--on", default="")
    parser.add_argument("--command", default="")
    return parser.parse_args(words)


SELF_TEST_SOURCE = """TEST(S, a) {
  run("x"); // twice
}
TEST(S, b) {
  run("x");
}
"""


def self_test():
    """Each way to be wrong is noticed, and what is right is not."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "s.cpp").write_text(SELF_TEST_SOURCE)

        def outcome(tests, checklist, device="cpu", sources=True):
            cases = "".join(
                f'<testcase name="{test}" file="s.cpp" line="{1 if test == "a" else 4}" '
                f'status="run" result="{result}" time="0" classname="S"><properties>'
                f'<property name="leaves" value="{leaves}"/>'
                f'<property name="device" value="{on}"/></properties></testcase>'
                for test, leaves, on, result in tests)
            (folder / "r.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
            (folder / "c.csv").write_text("id,suite,test,leaf_runs,device,leaves\n" + checklist)
            words = [str(folder / "c.csv"), str(folder / "r.xml"), str(folder / "o.xml"), "000",
                     "--device", device] + (["--sources", name] if sources else [])
            return check(arguments(words))

        done = "completed"
        two = '000-01,S,a,2,,"{not ,}x"\n'
        good = [
            ([("a", "not x ;x;", "cpu", done)], two, "cpu"),
            ([("a", "x;", "cpu", done), ("b", "y;", "cpu", done)],
             "000-01,S,a,1,,x\n000-02,S,b,1,,y\n", "cpu"),
            ([("a", "x;", "cuda", done), ("b", "x;", "cpu", done)],
             "000-01,S,a,1,,x\n000-02,S,b,1,cpu,x\n", "cuda"),
            ([("a", "x;", "cpu", done), ("b", "", "no", "skipped")],
             "000-01,S,a,1,,x\n000-02,S,b,1,cuda,x\n", "cpu"),
        ]
        bad = {
            "a run is made twice": ([("a", "x;x;", "cpu", done)], two, "cpu"),
            "a run is missing": ([("a", "x;", "cpu", done)], two, "cpu"),
            "one body stands for two tests": (
                [("a", "x;", "cpu", done), ("b", "x;", "cpu", done)],
                "000-01,S,a,1,,x\n000-02,S,b,1,,x\n", "cpu"),
            "another device": ([("a", "not x;x;", "cpu", done)], two, "cuda"),
            "a test is missing": ([], two, "cpu"),
            "a test is skipped": ([("a", "", "no", "skipped")], two, "cpu"),
            "a GPU test is skipped on a GPU": (
                [("a", "", "no", "skipped")], "000-01,S,a,1,cuda,x\n", "cuda"),
        }
        for tests, checklist, device in good:
            assert outcome(tests, checklist, device) == 0, (tests, checklist)
        for what, (tests, checklist, device) in bad.items():
            assert outcome(tests, checklist, device) == 1, what
        try:
            outcome([], "000-01,S,a,3,,x\n")
            raise AssertionError("a wrong count in the checklist")
        except ValueError:
            pass
    print("check_parity: self-test passed")
    return 0


def main():
    return self_test() if sys.argv[1:] == ["--self-test"] else check(arguments(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
