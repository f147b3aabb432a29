"""The page of one run."""

import json
import math
import re

import make_log
from page_checks import Expected, all_problems, brightness
from report_case import ATTACK, DESKTOP, PHONE, ReportCase, page_of, poisoned_lines, report


class RunPage(ReportCase):
    # ---- The command ----

    def test_the_command_prints_the_path_and_five_lines(self):
        lines = report(self.demo).stdout.splitlines()
        self.assertEqual(lines[0], str(self.demo / "report.html"))
        self.assertEqual(lines[1], "demo: finished after step 150, on 2, then 4 ranks")
        self.assertEqual(len(lines), 6)

    def test_the_command_writes_where_it_is_told(self):
        output = self.root / "elsewhere.html"
        done = report(self.demo, "--output", output)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(done.stdout.splitlines()[0], str(output))
        self.assertEqual(output.read_text(), self.demo_page.read_text())

    def test_the_command_takes_the_log_for_its_folder(self):
        done = report(self.demo / "log.jsonl", "--out", self.root / "from_log.html")
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
        page.press("ArrowLeft", "ArrowLeft")
        losses = {step: line["loss"] for step, line in Expected(self.demo).steps.items()}
        said = "document.querySelector('#loss').getAttribute('aria-valuetext')"
        self.assertIn("step 148", page.text("#tip"))
        self.assertIn(f"step 148: loss {losses[148]:.4f}", page.evaluate(said))
        page.press("Home")
        self.assertIn(f"step 1: loss {losses[1]:.4f}", page.evaluate(said))
        page.press("PageUp", "ArrowRight")
        self.assertIn("step 17: ", page.evaluate(said))
        page.press("End")
        self.assertEqual(page.evaluate("document.querySelector('#loss').getAttribute('aria-valuenow')"), "150")
        page.press("Escape")
        self.assertTrue(page.evaluate("document.querySelector('#tip').hidden"))

    def test_all_charts_show_the_step_that_one_is_asked_for(self):
        page = self.open(self.demo_page, **DESKTOP)
        page.evaluate("document.querySelector('#grad-norm').focus()")
        page.press("Home", *["ArrowRight"] * 41)
        line = Expected(self.demo).steps[42]
        for shown in ("step 42", f"loss{line['loss']:.4f}", f"gradient norm{line['grad_norm']:.4f}",
                      f"tokens per second{line['tokens'] / line['seconds']:,.0f}",
                      f"memory, together{sum(line['memory'].values()) / 1e6:.1f} MB"):
            self.assertIn(shown, page.text("#tip"))
        # At the same share of the width, in each of the charts.
        places = page.evaluate(
            "[...document.querySelectorAll('.chart .cross:not(.none)')].map((cross) => {"
            "  const axis = cross.parentNode.querySelector('.axis'), at = (node, name) => Number(node.getAttribute(name));"
            "  return (at(cross, 'x1') - at(axis, 'x1')) / (at(axis, 'x2') - at(axis, 'x1')); })")
        self.assertEqual(len(places), 5)
        for place in places:
            self.assertAlmostEqual(place, 41 / 149, places=6)

    def test_the_smoothed_loss_is_the_average_of_what_came_before(self):
        run = make_log.Log()
        run.add("start", step=0, world=1)
        losses = {step: 4.0 + step % 3 if step not in (20, 21) else "nan" for step in range(2, 122, 2)}
        for step, loss in losses.items():
            run.add("step", step=step, loss=loss)
        page = self.open(page_of(self.scratch_run(run.lines)), **DESKTOP)
        self.assertEqual(all_problems(page), [])
        self.assertEqual(page.text(".smoothing output"), "over 2 steps")
        page.evaluate("document.querySelector('#loss').focus()")
        read = lambda: page.evaluate("document.querySelector('#loss').getAttribute('aria-valuetext')")
        for amount in ("10", "20"):
            page.evaluate("document.querySelector('#smoothing').focus()")
            page.press("ArrowRight", *(["ArrowRight"] if amount == "10" else []))
            self.assertEqual(page.text(".smoothing output"), f"over {amount} steps")
            page.evaluate("document.querySelector('#loss').focus()")
            page.press("Home")
            for step, loss in list(losses.items())[:40]:
                if loss != "nan":
                    weights = {s: math.exp((s - step) / int(amount)) for s, l in losses.items() if s <= step and l != "nan"}
                    wanted = sum(weight * losses[s] for s, weight in weights.items()) / sum(weights.values())
                    self.assertIn(f"step {step}: loss {loss:.4f}, loss, smoothed {wanted:.4f}", read())
                page.press("ArrowRight")
        moves = "document.querySelector('#loss .curve.smooth').getAttribute('d').split('M').length - 1"
        self.assertEqual(page.evaluate(moves), 2)  # the nan is a gap
        page.evaluate("document.querySelector('#smoothing').focus()")
        page.press("Home")
        self.assertEqual(page.text(".smoothing output"), "off")
        self.assertEqual(len(page.texts("#loss .curve")), 1)

    def test_a_thinned_curve_is_smoothed_by_its_means(self):
        run = make_log.Log()
        run.add("start", step=0, world=1)
        for step in range(1, 9001):  # the extremes of each stretch are 1 and 100, and its mean is near 2
            run.add("step", step=step, loss=100.0 if step % 100 == 50 else 1.0)
        page = self.open(page_of(self.scratch_run(run.lines)), **DESKTOP)
        page.evaluate("document.querySelector('#smoothing').focus()")
        page.press("End")
        self.assertEqual(page.text(".smoothing output"), "over 2,000 steps")
        page.evaluate("document.querySelector('#loss').focus()")
        page.press("End")
        smooth = float(re.search(r"smoothed.* ([\d.]+)$", page.evaluate(
            "document.querySelector('#loss').getAttribute('aria-valuetext')"))[1])
        self.assertAlmostEqual(smooth, 1.99, delta=0.05)
        self.assertEqual(all_problems(page), [])

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
        lines = poisoned_lines(make_log.make().lines)
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
