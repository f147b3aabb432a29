"""What is wrong with a page that a browser shows."""

import json
import re


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
    last_eval = expected.evals[max(expected.evals)]
    worlds = " → ".join(str(attempt["world"]) for attempt in expected.attempts)
    spans = [span for rank in expected.timelines[-1]["ranks"] for span in rank["spans"]]
    parameters = sum(unit["parameters"] for unit in expected.units)
    memory = max(sum(step["memory"].values()) for step in expected.steps.values())
    checks = [
        ("the first tile", page.evaluate("document.querySelector('#tiles .tile').dataset.key"), "validation_loss"),
        ("final loss", tile("final_loss"), f"{expected.steps[last]['loss']:.4f}"),
        ("validation loss", tile("validation_loss"), f"{last_eval:.4f}"),
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
        ("parameters", page.texts("#units .total td")[0], f"{parameters:,}"),
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
    .map(([b]) => `"${a}" over "${b}" in ${svg.dataset.label}`));
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
