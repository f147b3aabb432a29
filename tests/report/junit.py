"""The results of unittest as JUnit's XML."""

import time
import unittest
import xml.etree.ElementTree as ET


class JUnitResult(unittest.TextTestResult):
    suite_name = ""
    case_name = ""

    def startTestRun(self):
        self.suite = ET.Element("testsuite", name=self.suite_name)

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def note(self, test, tag=None, text=""):
        name = test.id().split(".")[-1] if hasattr(test, "_testMethodName") else "set_up"
        case = ET.SubElement(self.suite, "testcase", classname=self.case_name, name=name,
                             time=f"{time.monotonic() - getattr(self, 'began', time.monotonic()):.3f}")
        if tag:
            lines = text.strip().splitlines()
            ET.SubElement(case, tag, message=lines[-1] if lines else tag).text = text

    def addSuccess(self, test):
        super().addSuccess(test)
        self.note(test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.note(test, "skipped", reason)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err:
            self.note(test, "failure", f"{subtest._message}\n{self._exc_info_to_string(err, test)}")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.note(test, "failure", self._exc_info_to_string(err, test))

    def addError(self, test, err):
        super().addError(test, err)
        self.note(test, "error", self._exc_info_to_string(err, test))


def run(tests, results, suite_name, case_name):
    """Runs them and writes the file `results`; returns whether all passed."""
    kind = type("Result", (JUnitResult,), {"suite_name": suite_name, "case_name": case_name})
    result = unittest.TextTestRunner(resultclass=kind, verbosity=2).run(tests)
    results.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(result.suite).write(results, encoding="utf-8", xml_declaration=True)
    return result.wasSuccessful()
