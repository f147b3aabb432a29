#!/usr/bin/env python3
"""Tests of the report as users see it: made by `tessera report`, shown by Chromium.

    browser_test.py TESSERA RESULTS.xml [CASE[.TEST]...]

Values are compared with the log, which is read here anew. RESULTS.xml is JUnit's.
"""

import pathlib
import sys
import unittest

import junit
from accessibility_cases import Accessibility
from comparison_cases import Comparison
from report_case import ReportCase
from run_page_cases import RunPage

CASES = {case.__name__: case for case in (RunPage, Comparison, Accessibility)}


def main():
    ReportCase.tessera, results = sys.argv[1], pathlib.Path(sys.argv[2])
    tests = unittest.TestLoader().loadTestsFromNames(sys.argv[3:] or list(CASES), sys.modules[__name__])
    return not junit.run(tests, results, "report_browser_test", "ReportBrowserTest")


if __name__ == "__main__":
    sys.exit(main())
