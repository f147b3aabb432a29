"""The page that compares several runs."""

import json

import make_log
from page_checks import layout_problems
from report_case import ATTACK, DESKTOP, PHONE, ReportCase, poisoned_lines, report


def named(lines, name, **config):
    """The lines of a log with another name and other settings."""
    changed = []
    for line in lines:
        entry = json.loads(line) if line.endswith("}") else None
        if entry and entry["kind"] == "start":
            entry["name"] = name
            entry["config"] = {**entry.get("config", {}), **config}
            line = json.dumps(entry)
        changed.append(line)
    return changed


def short_run(steps, reason=None, error="", name="", loss=3.0):
    log = make_log.Log()
    log.add("start", step=0, world=1, **({"name": name} if name else {}))
    for step in range(1, steps + 1):
        log.time += 1
        log.add("step", step=step, loss=loss - step / 100, tokens=10, seconds=1)
    if reason:
        log.add("end", step=steps, reason=reason, **({"error": error} if error else {}))
    return log.lines


class Comparison(ReportCase):
    def problems(self, page):
        return page.complaints + layout_problems(page)

    # ---- The command ----

    def test_the_command_prints_the_path_and_the_runs(self):
        other = self.scratch_run(named(make_log.make(90, 50).lines, "other"))
        done = report(self.demo, other)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], str(self.demo / "comparison.html"))
        self.assertEqual(lines[1], "demo: finished after step 150, on 2, then 4 ranks")
        self.assertEqual(lines[6], "other: finished after step 90, on 2, then 4 ranks")
        self.assertLess((self.demo / "comparison.html").stat().st_size, 250_000)
        # The page of the one run stays what it was.
        self.assertEqual(report(self.demo).stdout.splitlines()[0], str(self.demo / "report.html"))

    def test_the_command_rejects_a_run_that_is_not_there_or_named_twice(self):
        page = self.root / "rejected.html"
        done = report(self.demo, self.root / "none", "--out", page)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r'^tessera: there is no ".*/none/log\.jsonl"\. Give the folder of a run')
        done = report(self.demo, f"{self.demo}/../demo/", "--out", page)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, r'^tessera: ".*demo" and ".*/\.\./demo/" are the same run\. Name each run once\.')
        done = report(*[self.demo] * 9, "--out", page)
        self.assertIn("9 runs were named; a page shows 1 to 8", done.stderr)
        self.assertFalse(page.exists())

    def test_lines_that_cannot_be_read_are_named_with_their_run(self):
        lines = short_run(5, "finished", name="spoilt")
        run = self.scratch_run(lines[:2] + ["garbage"] + lines[2:])
        path = self.root / "spoilt.html"
        done = report(self.demo, run, "--out", path)
        self.assertEqual(done.stderr, f"{run}: 1 of 8 lines could not be read:\n  line 3 is not JSON\n")
        page = self.open(path)
        self.assertIn("of the log of spoilt could not be read", page.text("#problems h2"))

    # ---- The page ----

    def test_shows_the_curves_and_numbers_of_all_runs(self):
        other = self.scratch_run(named(make_log.make(90, 50).lines, "other", strategy="ddp"))
        path = self.compared(self.demo, other)
        for how in (DESKTOP, {**PHONE, "dark": True}):
            page = self.open(path, **how)
            self.assertEqual(self.problems(page), [])
            self.assertEqual(page.texts(".run-card .run-name"), ["demo", "other"])
            self.assertEqual(page.texts(".run-button .run-name"), ["demo", "other"])
            self.assertEqual(page.texts('[data-key="steps"] .value'), ["150", "90"])
            self.assertEqual(page.texts(".run-card dt:first-child")[0], "Validation loss")
            for chart in ("loss", "lr", "grad-norm", "tokens-per-second", "memory"):
                points = page.evaluate(
                    f"[0, 1].map((i) => document.querySelector(`#{chart} .main.run-${{i}}`).getAttribute('d')"
                    ".split(/[ML]/).length - 1)")
                self.assertEqual(points, [150, 90], chart)
            self.assertEqual(len(page.texts("#loss line.restart.run-0")), 1)
            rows = page.evaluate("[...document.querySelectorAll('#settings tbody tr')].map((row) =>"
                                 "[...row.children].map((node) => node.textContent))")
            self.assertEqual(rows, [["strategy", "fsdp", "ddp"]])
            self.assertIn("settings that all runs share", page.text("#equal-settings summary"))
            self.assertEqual(len(page.texts("#samples pre")), 2)

    def test_the_pointer_reads_the_values_of_all_runs(self):
        other = self.scratch_run(named(make_log.make(90, 50).lines, "other"))
        page = self.open(self.compared(self.demo, other), **DESKTOP)
        page.evaluate("document.querySelector('#lr').focus()")
        page.press("Home", *["ArrowRight"] * 49)
        shown = page.text("#tip")
        self.assertTrue(shown.startswith("step 50"), shown)
        self.assertRegex(shown, r"demo\d\.\d+e-4other\d\.?\d*e-4")
        self.assertEqual(page.evaluate("document.querySelectorAll('.chart .cross:not(.none)').length"), 5)
        page.press("End")
        self.assertIn("othernone", page.text("#tip"))  # its last step is 90

    def test_a_button_hides_a_run(self):
        other = self.scratch_run(short_run(400, "finished", name="far", loss=90))
        page = self.open(self.compared(self.demo, other), **DESKTOP)
        first = page.evaluate("document.querySelector('#loss .main.run-0').getAttribute('d')")
        page.evaluate("document.querySelectorAll('.run-button')[1].focus()")
        page.press("Enter")
        self.assertEqual(page.evaluate("document.querySelectorAll('.run-1.main').length"), 0)
        self.assertNotEqual(page.evaluate("document.querySelector('#loss .main.run-0').getAttribute('d')"), first)
        page.press("Enter")
        self.assertEqual(page.evaluate("document.querySelector('#loss .main.run-0').getAttribute('d')"), first)
        for _ in range(2):  # with no run there is nothing to draw, and nothing wrong
            page.evaluate("document.querySelectorAll('.run-button').forEach((button) => button.click())")
            page.evaluate("document.querySelector('#loss').focus()")
            page.press("ArrowLeft")
            self.assertEqual(self.problems(page), [])

    def test_runs_that_failed_or_lack_parts_are_shown(self):
        failed = self.scratch_run(short_run(30, "failed", "the loss is nan at step 31", "broken"), "failed")
        bare = self.scratch_run(make_log.make_bare().lines, "bare")
        start = self.scratch_run(make_log.make_bare().lines[:1], "start")
        page = self.open(self.compared(self.demo, failed, bare, start), **PHONE)
        self.assertEqual(self.problems(page), [])
        self.assertEqual(page.texts(".run-card .pill"), ["finished", "failed", "no end", "no end"])
        self.assertEqual(page.texts(".run-card .error"), ["the loss is nan at step 31"])
        self.assertEqual(page.texts(".run-card .run-name"), ["demo", "broken", "bare", "start"])
        self.assertEqual(len(page.texts("#loss .odd")), 1)
        nothing = self.open(self.compared_again(bare, start), **DESKTOP)
        self.assertEqual(self.problems(nothing), [])
        self.assertIn("The logs have no learning rate", nothing.text("#lr"))

    def compared_again(self, *runs):
        path = self.root / "again.html"
        self.assertEqual(report(*runs, "--out", path).returncode, 0)
        return path

    def test_runs_of_equal_names_are_told_apart_by_their_folders(self):
        runs = [self.scratch_run(short_run(steps, name="same"), folder) for steps, folder in ((5, "a"), (9, "b"))]
        page = self.open(self.compared(*runs))
        self.assertEqual(page.texts(".run-button .run-name"), [f"same ({run})" for run in runs])

    def test_eight_runs_fit_a_phone(self):
        runs = [self.scratch_run(named(make_log.make(60 + 10 * i, 45).lines, f"a run of a longer name, number {i}", seed=i),
                                 str(i)) for i in range(8)]
        page = self.open(self.compared(*runs), **PHONE)
        self.assertEqual(self.problems(page), [])
        self.assertEqual(len(page.texts("#loss .main")), 8)
        tones = page.evaluate("[...document.querySelectorAll('#loss .curve.main')].map((node) => getComputedStyle(node).stroke)")
        self.assertEqual(len(set(tones)), 8)

    def test_hostile_texts_are_shown_and_do_nothing(self):
        runs = [self.scratch_run(poisoned_lines(make_log.make().lines), str(i)) for i in range(2)]
        failed = named(make_log.make(90, 50).lines[:-1], "x", extra="y") + short_run(0, "failed", "why")[-1:]
        odd = self.scratch_run(poisoned_lines(failed), "odd")
        page = self.open(self.compared(*runs, odd), **PHONE)
        page.evaluate("document.querySelector('details').open = true")
        page.settle()
        self.assertEqual(self.problems(page), [])
        for selector in (".run-card", ".run-button", "#settings", "#equal-settings", "#samples pre", ".run-card .pill",
                         ".run-card .error"):
            self.assertIn(ATTACK, page.text(selector), selector)
        page.evaluate("document.querySelector('#loss').focus()")
        page.press("Home")
        self.assertIn(ATTACK, page.text("#tip"))
        self.assertIn(ATTACK, page.evaluate("document.querySelector('#loss').getAttribute('aria-valuetext')"))
        self.assertIsNone(page.evaluate("window.hacked"))
        self.assertEqual(page.evaluate("document.querySelectorAll('script').length"), 2)
        self.assertEqual(page.evaluate("document.querySelectorAll('img, iframe, object').length"), 0)
        self.assertEqual(page.complaints, [])
        box = page.evaluate("(() => { const box = document.querySelector('#tip').getBoundingClientRect();"
                            "return [box.left, box.right, box.top]; })()")
        self.assertGreaterEqual(min(box), 0)
        self.assertLessEqual(box[1], 375)
