#!/usr/bin/env python3
"""Tests of the report as users see it: made by `tessera report`, shown by Chromium.

    browser_test.py TESSERA RESULTS.xml [TEST...]

Values are compared with the log, which is read here anew. RESULTS.xml is JUnit's.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as ET

import make_log
from browser import Browser, Page

TESSERA = ""
PHONE = {"width": 375, "height": 812, "touch": True}
DESKTOP = {"width": 1280, "height": 900}

ATTACK = '</script><script nonce="page">window.hacked = 1</script><img src="x" onerror="window.hacked = 1">\'"&amp;'


def report(folder, *options):
    return subprocess.run([TESSERA, "report", str(folder), *options], capture_output=True, text=True, timeout=60)


def write_log(folder, lines):
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def page_of(folder):
    done = report(folder)
    if done.returncode != 0:
        raise AssertionError(f"tessera report failed: {done.stderr}")
    return folder / "report.html"


class Expected:
    """What a page must show, from the lines of its log."""

    def __init__(self, folder):
        lines = []
        for line in (folder / "log.jsonl").read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                pass  # torn
        self.attempts = [line for line in lines if line["kind"] == "start"]
        steps, self.num_repeated, evals = {}, 0, {}
        for line in lines:
            if line["kind"] == "step":
                again = [step for step in steps if step >= line["step"]]
                self.num_repeated += len(again)
                for step in again:
                    del steps[step]
                    evals.pop(step, None)
                steps[line["step"]] = line
            elif line["kind"] == "eval":
                evals[line["step"]] = line["loss"]
        self.steps, self.evals = steps, evals
        self.checkpoints = [line for line in lines if line["kind"] == "checkpoint"]
        self.timelines = [line for line in lines if line["kind"] == "timeline"]
        self.units = self.attempts[-1]["units"]


def value_problems(page, expected):
    """Where the page differs from the log."""
    tile = lambda key: page.text(f'[data-key="{key}"] .value')
    moves = lambda selector: sum(len(re.findall("[ML]", path)) for path in page.evaluate(
        f"[...document.querySelectorAll('{selector}')].map(path => path.getAttribute('d'))"))
    last = max(expected.steps)
    best = min(expected.evals.values())
    worlds = " → ".join(str(attempt["world"]) for attempt in expected.attempts)
    spans = [span for rank in expected.timelines[-1]["ranks"] for span in rank["spans"]]
    parameters = sum(unit["parameters"] for unit in expected.units)
    memory = max(sum(step["memory"].values()) for step in expected.steps.values())
    checks = [
        ("final loss", tile("final_loss"), f"{expected.steps[last]['loss']:.4f}"),
        ("best eval loss", tile("best_eval"), f"{best:.4f}"),
        ("steps", tile("steps"), str(last)),
        ("ranks", tile("world"), worlds),
        ("tokens", page.text('[data-key="tokens"] .more'),
         f"{sum(step['tokens'] for step in expected.steps.values()):,} in all"),
        ("peak memory", tile("peak_memory"), f"{memory / 1e6:.1f} MB"),
        ("points of the loss", moves("#loss .main"), len(expected.steps)),
        ("points of the learning rate", moves("#lr .main"), len(expected.steps)),
        ("points of the gradient norm", moves("#grad-norm .main"), len(expected.steps)),
        ("points of tokens per second", moves("#tokens-per-second .main"), len(expected.steps)),
        ("points that were run again", moves("#loss .curve.old"), expected.num_repeated),
        ("evaluations", len(page.texts("#loss .eval")), len(expected.evals)),
        ("kinds of memory", len(page.texts("#memory .area")), 6),
        ("marks of restarts", len(page.texts("#loss line.restart")), len(expected.attempts) - 1),
        ("marks of checkpoints", len(page.texts("#loss .checkpoint")), len({c["step"] for c in expected.checkpoints})),
        ("checkpoints", page.texts("#checkpoints .saved .mono"), [line["path"] for line in expected.checkpoints]),
        ("units", page.texts("#units .unit .mono"), [unit["name"] for unit in expected.units]),
        ("parameters", page.texts("#units .total td")[1], f"{parameters:,}"),
        ("attempts", len(page.texts("#attempts li")), len(expected.attempts)),
        ("spans", len(page.texts("#timeline rect.span")), len(spans)),
        ("ranks of the timeline", page.texts("#timeline .rank"),
         [f"rank {rank['rank']}" for rank in expected.timelines[-1]["ranks"]]),
    ]
    return [f"{name}: {shown!r}, the log has {wanted!r}" for name, shown, wanted in checks if shown != wanted]


OVERLAPS = """
[...document.querySelectorAll(".chart svg, #timeline svg.gutter")].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll("text")].map((node) => [node.textContent, node.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
    .filter(([, q]) => p.left < q.right && q.left < p.right && p.top < q.bottom - 1 && q.top < p.bottom - 1)
    .map(([b]) => `"${a}" over "${b}" in ${svg.getAttribute("aria-label")}`));
})
"""


def layout_problems(page):
    """What sticks out, and labels that overlap."""
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return ([f"the page is {wide} pixels too wide"] if wide > 0 else []) + page.evaluate(OVERLAPS)


def all_problems(page, expected=None):
    found = page.complaints + layout_problems(page)
    return found + (value_problems(page, expected) if expected else [])


def brightness(color):
    red, green, blue = map(float, re.findall(r"[\d.]+", color)[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


class ReportTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory(prefix="tessera-report-")
        cls.addClassCleanup(cls.scratch.cleanup)
        cls.root = pathlib.Path(cls.scratch.name)
        cls.browser = Browser()
        cls.addClassCleanup(cls.browser.close)
        cls.demo = write_log(cls.root / "demo", make_log.make().lines)
        cls.demo_page = page_of(cls.demo)

    def open(self, path, **how):
        page = Page(self.browser, path, **how)
        self.addCleanup(page.close)
        return page

    def scratch_run(self, lines):
        return write_log(self.root / self.id(), lines)

    # ---- The command ----

    def test_the_command_prints_the_path_and_five_lines(self):
        lines = report(self.demo).stdout.splitlines()
        self.assertEqual(lines[0], str(self.demo / "report.html"))
        self.assertEqual(lines[1], "demo: finished after step 150, on 2, then 4 ranks")
        self.assertEqual(len(lines), 6)

    def test_the_command_writes_where_it_is_told(self):
        output = self.root / "elsewhere.html"
        done = report(self.demo, "--output", str(output))
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stdout.splitlines()[0], str(output))
        self.assertEqual(output.read_text(), self.demo_page.read_text())

    def test_the_command_takes_the_log_for_its_folder(self):
        done = report(self.demo / "log.jsonl", "--output", str(self.root / "from_log.html"))
        self.assertEqual(done.returncode, 0)
        self.assertEqual((self.root / "from_log.html").read_text(), self.demo_page.read_text())

    def test_the_command_rejects_a_folder_without_a_log(self):
        done = report(self.root)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r'^tessera: there is no ".*/log\.jsonl"\. Give the folder of a run')
        self.assertFalse((self.root / "report.html").exists())

    def test_lines_that_cannot_be_read_are_named_on_stderr_and_in_the_page(self):
        lines = make_log.make_bare().lines
        run = self.scratch_run(lines[:3] + ["garbage <b>", '{"kind":"step","step":"x"}'] + lines[3:])
        done = report(run)
        self.assertEqual(done.returncode, 0)
        self.assertIn("2 of 8 lines could not be read:\n  line 4 is not JSON\n  line 5 \"step\" is not a count\n", done.stderr)
        page = self.open(run / "report.html")
        self.assertEqual(page.texts("#problems li"), ["line 4 is not JSON", 'line 5 "step" is not a count'])
        self.assertEqual(all_problems(page), [])

    # ---- The page ----

    def test_shows_what_is_in_the_log_on_a_desktop(self):
        self.assertEqual(all_problems(self.open(self.demo_page, **DESKTOP), Expected(self.demo)), [])

    def test_shows_what_is_in_the_log_on_a_phone_in_the_dark(self):
        page = self.open(self.demo_page, **PHONE, dark=True)
        self.assertEqual(all_problems(page, Expected(self.demo)), [])
        self.assertEqual(page.evaluate("document.querySelectorAll('.missing').length"), 0)

    def test_follows_the_colour_scheme(self):
        for dark in (False, True):
            page = self.open(self.demo_page, dark=dark)
            of = lambda selector, what: brightness(page.evaluate(
                f"getComputedStyle(document.querySelector('{selector}')).{what}"))
            ground, card, text = of("body", "backgroundColor"), of(".card", "backgroundColor"), of("body", "color")
            if dark:
                self.assertLess(max(ground, card), 0.2)
                self.assertGreater(text, 0.8)
            else:
                self.assertGreater(min(ground, card), 0.9)
                self.assertLess(text, 0.2)
            for selector in ("#loss .main", "#lr .main"):
                self.assertGreater(abs(of(selector, "stroke") - card), 0.25)

    def test_a_new_width_draws_anew(self):
        page = self.open(self.demo_page, **DESKTOP)
        before = page.evaluate("document.querySelector('#loss svg').clientWidth")
        page.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=False)
        page.settle()
        after = page.evaluate("document.querySelector('#loss svg').clientWidth")
        self.assertLess(after, 360)
        self.assertGreater(before, 800)
        self.assertEqual(all_problems(page, Expected(self.demo)), [])

    def test_the_pointer_reads_values(self):
        page = self.open(self.demo_page, **DESKTOP)
        losses = {step: line["loss"] for step, line in Expected(self.demo).steps.items()}
        for share in (0.3, 0.7):
            x, y = page.evaluate(
                "(() => { const box = document.querySelector('#loss .main').getBoundingClientRect();"
                f"return [box.left + box.width * {share}, box.top + box.height / 2]; }})()")
            page.move_mouse(x, y)
            shown = page.text("#tip")
            step = int(re.match(r"step (\d+)", shown)[1])
            self.assertAlmostEqual(step, 1 + share * 149, delta=1)
            self.assertIn(f"loss{losses[step]:.4f}", shown)
        page.move_mouse(2, 2)
        self.assertTrue(page.evaluate("document.querySelector('#tip').hidden"))
        self.assertEqual(page.complaints, [])

    def test_a_touch_names_a_span(self):
        page = self.open(self.demo_page, **PHONE)
        page.evaluate("document.querySelector('#timeline').scrollIntoView({ block: 'center' })")
        page.settle()
        x, y = page.evaluate(
            "(() => { const box = document.querySelectorAll('#timeline rect.compute')[9].getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()")
        page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        page.settle()
        compute = [span for span in Expected(self.demo).timelines[-1]["ranks"][0]["spans"] if span["lane"] == "compute"]
        self.assertTrue(page.text("#tip").startswith(sorted(compute, key=lambda span: span["start"])[9]["name"]))
        box = page.evaluate("(() => { const box = document.querySelector('#tip').getBoundingClientRect();"
                            "return [box.left, box.right]; })()")
        self.assertGreaterEqual(box[0], 0)
        self.assertLessEqual(box[1], 375)
        page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def test_the_keyboard_reads_values(self):
        page = self.open(self.demo_page)
        page.evaluate("document.querySelector('#loss').focus()")
        for _ in range(2):
            page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
        page.settle()
        self.assertIn("step 149", page.text("#tip"))

    def test_the_log_scale_can_be_chosen(self):
        page = self.open(self.demo_page)
        path = "document.querySelector('#loss .main').getAttribute('d')"
        linear = page.evaluate(path)
        page.evaluate("document.querySelector('#log-scale').click()")
        self.assertNotEqual(page.evaluate(path), linear)
        self.assertEqual(page.evaluate("document.querySelector('#log-scale').getAttribute('aria-pressed')"), "true")
        self.assertEqual(all_problems(page, Expected(self.demo)), [])
        page.evaluate("document.querySelector('#log-scale').click()")
        self.assertEqual(page.evaluate(path), linear)

    def test_the_timeline_zooms_and_shows_the_other_step(self):
        page = self.open(self.demo_page, **PHONE)
        width = "document.querySelector('#timeline .scroll svg').clientWidth"
        before = page.evaluate(width)
        page.evaluate("document.querySelector('[aria-label=\"zoom in\"]').click()")
        self.assertEqual(page.evaluate(width), 2 * before)
        self.assertEqual(all_problems(page), [])
        page.evaluate("(() => { const choice = document.querySelector('#timeline-controls select');"
                      "choice.value = 0; choice.dispatchEvent(new Event('change')); })()")
        self.assertEqual(page.texts("#timeline .rank"), ["rank 0", "rank 1"])
        self.assertIn("step 10", page.text("#timeline-note"))

    def test_tells_restarts_from_continuations_and_why_one_failed(self):
        run = make_log.Log()
        for first, reason in ((0, "finished"), (3, "failed"), (6, "stopped")):
            run.add("start", step=first, world=2)
            for step in range(first + 1, first + 4):
                run.add("step", step=step, loss=5.0 - step / 4)
            run.add("end", step=first + 3, reason=reason, **({"error": ATTACK} if reason == "failed" else {}))
        page = self.open(page_of(self.scratch_run(run.lines)), **PHONE)
        self.assertEqual(all_problems(page), [])
        marks = [text for text in page.texts("#loss svg text") if "ranks" in text]
        self.assertEqual(marks, ["continued, 2 ranks", "restart, 2 ranks"])
        self.assertIn("restart or continued", page.text("#loss-legend"))
        self.assertEqual(page.texts("#attempts .mono"), [ATTACK])
        self.assertIn("failed", page.texts("#attempts li")[1])

    def test_a_restart_from_nothing_has_its_mark(self):
        run = make_log.Log()
        for _ in range(2):
            run.add("start", step=0, world=2)
            for step in (1, 2):
                run.add("step", step=step, loss=5.0 - step)
        page = self.open(page_of(self.scratch_run(run.lines)))
        self.assertEqual(all_problems(page), [])
        self.assertEqual(len(page.texts("#loss line.restart")), 1)

    def test_evaluations_alone_are_drawn(self):
        run = make_log.Log()
        run.add("start", step=0, world=2)
        for step, loss in ((10, 4.0), (20, 3.0), (30, "nan")):
            run.add("eval", step=step, loss=loss)
        page = self.open(page_of(self.scratch_run(run.lines)))
        self.assertEqual(all_problems(page), [])
        self.assertEqual(len(page.texts("#loss .main")), 1)
        self.assertEqual(len(page.texts("#loss .odd")), 1)
        self.assertEqual(page.evaluate("document.querySelectorAll('#loss .missing').length"), 0)

    def test_says_what_a_log_lacks(self):
        page = self.open(page_of(self.scratch_run(make_log.make_bare().lines)), **PHONE)
        self.assertEqual(all_problems(page), [])
        for part in ("lr", "grad-norm", "tokens-per-second", "memory", "timeline", "units", "checkpoints", "samples",
                     "config"):
            self.assertEqual(page.evaluate(f"document.querySelectorAll('#{part} .missing').length"), 1, part)
            self.assertEqual(page.evaluate(f"document.querySelectorAll('#{part} svg').length"), 0, part)
        self.assertEqual(page.text("#state"), "no end")
        self.assertEqual(len(page.texts("#loss .odd")), 1)  # the loss that is nan

    def test_a_log_of_a_start_alone_is_a_page(self):
        page = self.open(page_of(self.scratch_run(make_log.make_bare().lines[:1])))
        self.assertEqual(all_problems(page), [])
        self.assertIn("no loss", page.text("#loss"))

    def test_odd_numbers_are_drawn(self):
        lines = make_log.make_bare().lines[:1]
        for step, loss in enumerate((0, -1e300, 1e300, "inf", "-inf", "nan", 1e-300, -0.0), 1):
            lines.append(json.dumps({"kind": "step", "step": step * 10**14, "loss": loss, "lr": 0, "grad_norm": "inf",
                                     "tokens": 9007199254740991, "seconds": 1e-300, "memory": {"full": 0}}))
        page = self.open(page_of(self.scratch_run(lines)), **PHONE)
        self.assertEqual(all_problems(page), [])
        page.evaluate("document.querySelector('#log-scale').click()")
        self.assertEqual(all_problems(page), [])

    def test_hostile_texts_are_shown_and_do_nothing(self):
        def poisoned(value):
            if isinstance(value, dict):
                return {key if key in KEYS else ATTACK + key: poisoned(part) for key, part in value.items()}
            if isinstance(value, list):
                return [poisoned(part) for part in value]
            return ATTACK + value if isinstance(value, str) and value not in WORDS else value

        lines = [json.dumps(poisoned(json.loads(line))) for line in make_log.make().lines if line.endswith("}")]
        page = self.open(page_of(self.scratch_run(lines)), **PHONE)
        page.evaluate("document.querySelector('details').open = true")
        page.settle()
        self.assertEqual(all_problems(page), [])
        self.assertIsNone(page.evaluate("window.hacked"))
        self.assertEqual(page.evaluate("document.querySelectorAll('script').length"), 2)
        self.assertEqual(page.evaluate("document.querySelectorAll('img, iframe, object').length"), 0)
        for selector in ("#name", "#state", "#facts", "#units", "#attempts", "#checkpoints", "#samples pre", "#config"):
            self.assertIn(ATTACK, page.text(selector), selector)
        x, y = page.evaluate(
            "(() => { const span = document.querySelector('#timeline rect.span');"
            "span.scrollIntoView({ block: 'center' }); const box = span.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + 5]; })()")
        page.move_mouse(x, y)
        self.assertIn(ATTACK[:60], page.text("#tip"))  # names of spans are cut
        self.assertIsNone(page.evaluate("window.hacked"))
        self.assertEqual(page.complaints, [])

    # ---- These tests themselves ----

    def broken(self, *changes):
        text = self.demo_page.read_text()
        for old, new in changes:
            self.assertIn(old, text)
            text = text.replace(old, new, 1)
        path = self.root / f"broken-{len(list(self.root.iterdir()))}.html"
        path.write_text(text)
        return self.open(path, **PHONE)

    def assert_finds(self, page, words, expected=None):
        found = all_problems(page, expected)
        self.assertTrue(any(words in problem for problem in found), f"{words!r} is not in {found}")

    def test_faults_of_a_page_are_found(self):
        end = "</body>"
        script = '<script nonce="page">{}</script></body>'
        self.assert_finds(self.broken((end, script.format("console.error('ouch')"))), "ouch")
        self.assert_finds(self.broken((end, script.format("nobody.home()"))), "nobody is not defined")
        image = (end, '<img src="http://127.0.0.1:9/x.png"></body>')
        self.assert_finds(self.broken(image), "Content Security Policy")
        self.assert_finds(self.broken(image, ("Content-Security-Policy", "no-policy")), "request: http://127.0.0.1:9/x.png")
        self.assert_finds(self.broken((end, '<div style="width:500px">.</div></body>')), "too wide")
        label = ('"text-anchor": anchor }, names[i]', '"text-anchor": anchor }, "a label that is far too long"')
        self.assert_finds(self.broken(label), "over")

    def test_values_that_differ_from_the_log_are_found(self):
        one_more = '"path":"p","step":100},{"attempt":1,"blocked_seconds":0.1,"path":"checkpoints'
        expected = Expected(self.demo)
        page = self.broken(
            ('"final_loss":1.', '"final_loss":2.'), ('"path":"checkpoints', one_more), ('["blocks.3",', '["blocks.33",'))
        self.assert_finds(page, "final loss: '2.", expected)
        self.assert_finds(page, "checkpoints: ", expected)
        self.assert_finds(page, "units: ", expected)
        del expected.steps[149]
        self.assert_finds(page, "points of the loss: 150, the log has 149", expected)


# What the format itself means by a text; all others are the user's.
KEYS = {"kind", "time", "format", "attempt", "step", "world", "device", "name", "versions", "host", "config", "units",
        "parameters", "full_bytes", "shard_bytes", "path", "loss", "lr", "grad_norm", "tokens", "seconds", "memory",
        "shards", "full", "gradients", "optimizer", "activations", "other", "prompt", "text", "blocked_seconds",
        "ranks", "rank", "spans", "lane", "start", "end", "reason"}
WORDS = {"start", "resume", "step", "eval", "sample", "checkpoint", "timeline", "end",
         "compute", "gather", "reduce", "wait"}


class JUnitResult(unittest.TextTestResult):
    def startTestRun(self):
        self.suite = ET.Element("testsuite", name="report_browser_test")

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def note(self, test, tag=None, text=""):
        name = test.id().split(".")[-1] if hasattr(test, "_testMethodName") else "set_up"
        case = ET.SubElement(self.suite, "testcase", classname="ReportBrowserTest", name=name,
                             time=f"{time.monotonic() - getattr(self, 'began', time.monotonic()):.3f}")
        if tag:
            lines = text.strip().splitlines()
            ET.SubElement(case, tag, message=lines[-1] if lines else tag).text = text

    def addSuccess(self, test):
        super().addSuccess(test)
        self.note(test)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.note(test, "failure", self._exc_info_to_string(err, test))

    def addError(self, test, err):
        super().addError(test, err)
        self.note(test, "error", self._exc_info_to_string(err, test))


def main():
    global TESSERA
    TESSERA, results = sys.argv[1], pathlib.Path(sys.argv[2])
    loader = unittest.TestLoader()
    names = [f"ReportTest.{name}" for name in sys.argv[3:]] or ["ReportTest"]
    tests = loader.loadTestsFromNames(names, sys.modules[__name__])
    runner = unittest.TextTestRunner(resultclass=JUnitResult, verbosity=2)
    result = runner.run(tests)
    results.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(result.suite).write(results, encoding="utf-8", xml_declaration=True)
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
