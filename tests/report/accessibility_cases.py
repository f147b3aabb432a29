"""Whether everybody can use the pages: axe-core, html-validate, the keyboard, colours."""

import itertools
import pathlib
import re

import checkers
import make_log
from report_case import ReportCase, write_log

STYLE = pathlib.Path(__file__).resolve().parents[2] / "src" / "report" / "page" / "page.css"

# What people who lack one kind of cone see (Machado and others, 2009), on linear RGB.
SIGHTS = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(color):
    parts = (int(color[i:i + 2], 16) / 255 for i in (1, 3, 5))
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(color):
    red, green, blue = linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def lab(color, sight):
    red, green, blue = (min(1, max(0, sum(a * b for a, b in zip(row, linear(color))))) for row in sight)
    bend = lambda t: t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
    x = bend((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047)
    y = bend(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    z = bend((0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one, other, sight):
    """In CIELAB, where 2 can just be told apart."""
    return sum((a - b) ** 2 for a, b in zip(lab(one, sight), lab(other, sight))) ** 0.5


def schemes():
    """The colours of page.css by name: light, then dark."""
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in
                   STYLE.read_text().split("* { box-sizing")[0].split("prefers-color-scheme: dark"))
    return {"light": light, "dark": {**light, **dark}}


class Accessibility(ReportCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        lines = make_log.make(120, 70).lines
        cls.other = write_log(cls.root / "other", [line.replace('"demo"', '"other"') for line in lines])

    def pages(self):
        """Each page, in each scheme and width."""
        for name, path in (("run", self.demo_page), ("comparison", self.compared(self.demo, self.other))):
            for dark, width in itertools.product((False, True), (390, 1280)):
                yield f"{name}, {'dark' if dark else 'light'}, {width}", self.open(path, width=width, dark=dark)

    def need_checkers(self):
        if not checkers.are_here():
            self.skipTest("no axe-core and html-validate here: run scripts/fetch_page_checkers.sh")

    def test_axe_has_nothing_against_the_pages(self):
        self.need_checkers()
        for name, page in self.pages():
            with self.subTest(name):
                page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
                self.assertEqual(checkers.axe_problems(page), [])
                # With a tip, and a run that is hidden.
                page.evaluate("document.querySelector('#loss').focus()")
                page.evaluate("(document.querySelector('.run-button') || document.querySelector('#log-scale')).click()")
                page.press("ArrowLeft")
                self.assertEqual(checkers.axe_problems(page), [])
                self.assertEqual(page.complaints, [])

    def test_html_validate_has_nothing_against_the_pages(self):
        self.need_checkers()
        for path in (self.demo_page, self.compared(self.demo, self.other)):
            self.assertEqual(checkers.html_problems(path.read_text(), self.root), [])
        for name, page in self.pages():
            with self.subTest(name):
                drawn = page.evaluate("'<!DOCTYPE html>\\n' + document.documentElement.outerHTML")
                drawn = re.sub(r' (hidden|disabled)=""', r" \1", drawn)  # as the browser writes them
                self.assertEqual(checkers.html_problems(drawn, self.root), [])

    def test_the_checkers_find_faults(self):
        self.need_checkers()
        broken = self.root / "broken.html"
        text = self.demo_page.read_text()
        broken.write_text(text.replace("</main>", '<button type="button"></button><p><div></div></p></main>'))
        self.assertTrue(any(found.startswith("button-name: ") for found in checkers.axe_problems(self.open(broken))))
        self.assertTrue(any("element-permitted" in found or "close-order" in found
                            for found in checkers.html_problems(broken.read_text(), self.root)))
        pale = self.root / "pale.html"
        pale.write_text(text.replace("--muted: #657084", "--muted: #a9b1bf"))
        self.assertTrue(any(found.startswith("color-contrast: ") for found in checkers.axe_problems(self.open(pale))))

    def test_tab_reaches_every_control_and_shows_where_it_is(self):
        for name, page in self.pages():
            with self.subTest(name):
                wanted = set(page.evaluate(MARK_CONTROLS))
                reached = []
                for _ in range(len(wanted) + 5):
                    page.press("Tab")
                    at = page.evaluate(FOCUSED)
                    if at is None or at["mark"] in [one["mark"] for one in reached]:
                        break
                    reached.append(at)
                self.assertEqual({at["mark"] for at in reached}, wanted)
                self.assertEqual([at for at in reached if not at["is_visible"]], [])
                self.assertEqual(reached[0]["name"], "Skip to the report")

    def test_the_skip_link_leads_to_the_report(self):
        page = self.open(self.demo_page)
        page.press("Tab", "Enter")
        self.assertEqual(page.evaluate("document.activeElement.id"), "main")

    def test_the_keyboard_walks_through_the_timeline(self):
        page = self.open(self.demo_page)
        page.evaluate("document.querySelector('#timeline .scroll').focus()")
        page.press("ArrowRight")
        first = page.text("#said")
        self.assertIn("compute rank 0", first)
        page.press("ArrowRight")
        self.assertNotEqual(page.text("#said"), first)
        page.press("ArrowDown")
        self.assertIn("gather rank 0", page.text("#said"))
        self.assertFalse(page.evaluate("document.querySelector('#tip').hidden"))
        for _ in range(20):
            page.press("ArrowDown")
        self.assertIn("rank 3", page.text("#said"))
        page.press("Escape")
        self.assertTrue(page.evaluate("document.querySelector('#tip').hidden"))

    def test_space_switches_the_log_scale(self):
        page = self.open(self.demo_page)
        page.evaluate("document.querySelector('#log-scale').focus()")
        page.press(" ")
        self.assertEqual(page.evaluate("document.querySelector('#log-scale').getAttribute('aria-pressed')"), "true")

    def test_nothing_moves(self):
        """So there is nothing to stop for those who prefer reduced motion."""
        for name, page in self.pages():
            with self.subTest(name):
                self.assertEqual(page.evaluate(
                    "[...document.querySelectorAll('*')].filter((node) => { const style = getComputedStyle(node);"
                    "  return style.transitionDuration !== '0s' || style.animationName !== 'none'"
                    "    || style.scrollBehavior !== 'auto'; }).map((node) => node.outerHTML.slice(0, 80))"), [])

    def test_lines_and_texts_of_charts_have_contrast(self):
        for scheme, colors in schemes().items():
            for name in ("text", "muted", "accent", "bad"):
                self.assertGreaterEqual(contrast(colors[name], colors["card"]), 4.5, f"{name}, {scheme}")
            lines = [name for name in colors if re.fullmatch(r"run-\d|accent|eval|compute|gather|wait", name)]
            self.assertEqual(len(lines), 13)
            for name in lines:
                self.assertGreaterEqual(contrast(colors[name], colors["card"]), 3, f"{name}, {scheme}")

    def test_runs_are_told_apart_whatever_colours_one_sees(self):
        for scheme, colors in schemes().items():
            runs = [colors[f"run-{i}"] for i in range(8)]
            for (a, b), (sight, seen) in itertools.product(itertools.combinations(runs, 2), SIGHTS.items()):
                self.assertGreaterEqual(distance(a, b, seen), 12, f"{a} and {b} with {sight}, {scheme}")
        # And by their dashes.
        dashes = re.findall(r"\.run-\d \{[^}]*--dash: ([^;]+);", STYLE.read_text())
        self.assertEqual(len(set(dashes)), 8)


# Every element that a pointer can operate, with a number.
MARK_CONTROLS = """
[...document.querySelectorAll("a[href], button, select, input, summary, [role=slider], [role=application], [role=region]")]
  .filter((node) => !node.disabled).map((node, i) => node.dataset.mark = String(i))
"""

# What has the focus, and whether that can be seen: an outline, inside the window.
FOCUSED = """
(() => {
  const node = document.activeElement;
  if (!node || node === document.body || node === document.documentElement) return null;
  const style = getComputedStyle(node), box = node.getBoundingClientRect();
  return {
    mark: node.dataset.mark, name: node.textContent.trim().slice(0, 40) || node.getAttribute("aria-label"),
    is_visible: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2
      && box.bottom > 0 && box.top < innerHeight && box.width > 0,
  };
})()
"""
