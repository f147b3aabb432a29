"""Tests are started by whatever python3 configured the build. Those that need torch or
transformers go on in a Python that has them, or are reported as skipped."""

import os
import pathlib
import sys
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).parents[2]


def with_torch(test):
    """The Python of build/python, where scripts/setup.sh found torch."""
    note = ROOT / "build" / "python"
    python = note.read_text().strip() if note.exists() else ""
    _go_on(test, python, "this LibTorch came without Python")


def with_transformers(test):
    """The Python of .transformers, which scripts/fetch_transformers.sh made."""
    whole = (ROOT / ".transformers" / "version.txt").exists()
    _go_on(test, str(ROOT / ".transformers/bin/python") if whole else "", "no transformers here")


def _go_on(test, python, why_not):
    if os.environ.get("TESSERA_TEST_PYTHON") == python and python:
        return
    if python:
        os.environ["TESSERA_TEST_PYTHON"] = python
        os.execv(python, [python, "-W", "ignore", *sys.argv])
    suite = ET.Element("testsuite", name=test)
    ET.SubElement(ET.SubElement(suite, "testcase", classname=test, name="all"), "skipped", message=why_not)
    results = pathlib.Path(sys.argv[1])
    results.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(results, encoding="utf-8", xml_declaration=True)
    print(f"skipped: {why_not}")
    sys.exit(0)
