#!/usr/bin/env python3
"""Looks at the built site in a browser: site_check.py SITE [--pictures FOLDER]

- axe-core and html-validate have nothing against any page, wide and light, narrow and dark.
- No page is wider than its window; no page loads anything but the site.
- The search finds the pages that users look for, by their words.
- Copy buttons copy commands without prompts and output.
- The checkers find the faults of a broken page.

--pictures writes a screenshot of each page in both widths and schemes instead.
The pages of the API are Doxygen's, and are not looked at.
"""

import argparse
import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import browser  # noqa: E402
import checkers  # noqa: E402

# Headings that begin with a number have such ids.
HTML_RULES = pathlib.Path(__file__).resolve().parent / "htmlvalidate.json"
VIEWS = [{"width": 1280, "dark": False}, {"width": 390, "dark": True, "touch": True}]
ALL_VIEWS = [{"width": width, "dark": dark, "touch": width < 800} for width in (390, 1280) for dark in (False, True)]

# What people type, and the page that must be among the first three.
SEARCHES = {
    "resume": "checkpoints.html", "resuming training": "checkpoints.html", "restart after crash": "launching.html",
    "background save": "checkpoints.html", "async save": "checkpoints.html",
    "OOM": "plan.html", "out of memory": "plan.html", "CUDA out of memory": "plan.html",
    "torchrun": "launching.html", "mpirun": "launching.html", "slurm": "launching.html",
    "DeepSpeed": "from-python.html", "Accelerate": "from-python.html", "FSDP2": "from-python.html",
    "zero stage 2": "zero.html", "gradient checkpointing": "fsdp.html", "activation checkpointing": "fsdp.html",
    "bf16": "mixed-precision.html", "amp": "mixed-precision.html", "fp16 loss scaling": "mixed-precision.html",
    "gradient accumulation": "training-loop.html", "clip gradients": "training-loop.html",
    "cpu offload": "offload.html", "hang": "debugging.html", "deadlock": "debugging.html", "timeout": "debugging.html",
    "hugging face": "interop.html", "safetensors": "interop.html", "export model": "interop.html",
    "install": "installing.html", "pip install": "installing.html", "cmake find_package": "installing.html",
    "docker": "installing.html", "gpu": "installing.html", "cuda": "installing.html", "nccl": "installing.html",
    "tensorboard": "monitor.html", "profiler": "monitor.html", "dataloader": "data.html",
    "distributed sampler": "data.html", "learning rate": "schedules.html", "EMA": "schedules.html",
    "adamw": "optim.html", "getting started": "tutorial.html", "example": "tutorial.html", "quick start": "tutorial.html",
    "multi node": "launching.html", "elastic": "launching.html", "corrupt checkpoint": "ckpt.html",
    "memory per rank": "plan.html", "benchmark": "performance.html", "not supported": "limitations.html",
}

# What a page must not have.
FAULTS = """<button type="button"></button><p><div></div></p>
<p style="color: #aaa; background: #fff">pale</p><div style="width: 2000px">wide</div></main>"""


def pages_of(site):
    return sorted(path for path in site.rglob("*.html") if "api" not in path.relative_to(site).parts[:-1])


def foreign_requests(page, site):
    """The page's complaints, but for files of the site."""
    inside = "request: " + site.absolute().as_uri()
    return [complaint for complaint in page.complaints if not complaint.startswith(inside)]


def layout_problems(page, width):
    reaches = page.evaluate("document.documentElement.scrollWidth")
    if reaches > width:
        yield f"is {reaches} pixels wide in a window of {width}"
    tiny = page.evaluate("[...document.querySelectorAll('main img')].filter((image) => !image.naturalWidth).map((image) => image.src)")
    yield from (f"shows no picture for {source}" for source in tiny)


def page_problems(program, path, site):
    for view in VIEWS:
        page = browser.Page(program, path, **view)
        where = f"{path.relative_to(site)}, {view['width']} pixels"
        found = [*foreign_requests(page, site), *layout_problems(page, view["width"]), *checkers.axe_problems(page)]
        yield from (f"{where}: {problem}" for problem in found)
        page.close()


def search_problems(program, site):
    page = browser.Page(program, site / "index.html")
    for words, wanted in SEARCHES.items():
        urls = page.evaluate(f"find_sections(SEARCH_PAGES, {json.dumps(words)}, 3).map(({{ url }}) => url)")
        if not any(url.split("#")[0] == wanted for url in urls):
            yield f'the search for "{words}" finds {urls or "nothing"}, and not {wanted} among the first three'
    page.evaluate("document.getElementById('search').focus()")
    page.evaluate("(() => { const field = document.getElementById('search'); field.value = 'resume';"
                  " field.dispatchEvent(new Event('input')); })()")
    if not page.texts("#found a") or page.evaluate("document.getElementById('found').hidden"):
        yield "the search field shows nothing for resume"
    if found := checkers.axe_problems(page):
        yield from (f"with search results: {problem}" for problem in found)
    page.close()


def copy_problems(program, site):
    page = browser.Page(program, site / "tutorial.html")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied = text; } } })")
    count = page.evaluate("document.querySelectorAll('main pre').length")
    if page.evaluate("document.querySelectorAll('main .copy').length") != count or not count:
        yield "tutorial.html: not every block of code has a button that copies it"
    page.evaluate("[...document.querySelectorAll('main .code')].find((block) => block.textContent.includes('$ ls checkpoints'))"
                  ".querySelector('.copy').click()")
    wanted = "ls checkpoints\ntessera ckpt inspect checkpoints/step_00000100"
    if (copied := page.evaluate("window.copied")) != wanted:
        yield f"tutorial.html: a block with prompts is copied as {copied!r}, not as {wanted!r}"
    page.close()


def checker_problems(program, site, folder):
    """Whether the checkers would have found something."""
    broken = folder / "broken.html"
    broken.write_text((site / "tutorial.html").read_text().replace("</main>", FAULTS))
    page = browser.Page(program, broken, width=390)
    found = checkers.axe_problems(page)
    for rule in ("button-name", "color-contrast"):
        if not any(problem.startswith(rule) for problem in found):
            yield f"axe-core does not find {rule} on a broken page"
    if not list(layout_problems(page, 390)):
        yield "a page that is too wide is not found"
    page.close()
    if not checkers.html_problems_of_files([broken], folder, HTML_RULES):
        yield "html-validate finds nothing on a broken page"


def problems_of(program, site, folder):
    yield from checker_problems(program, site, folder)
    yield from search_problems(program, site)
    yield from copy_problems(program, site)
    paths = pages_of(site)
    for name, found in checkers.html_problems_of_files(paths, folder, HTML_RULES).items():
        yield from (f"{name}: {problem}" for problem in found)
    for path in paths:
        yield from page_problems(program, path, site)


def take_pictures(program, site, folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for path in pages_of(site):
        if names and path.stem not in names:
            continue
        for view in ALL_VIEWS:
            page = browser.Page(program, path, **view)
            scheme = "dark" if view["dark"] else "light"
            page.screenshot(folder / f"{path.stem}-{view['width']}-{scheme}.png")
            page.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--pictures", type=pathlib.Path)
    parser.add_argument("names", nargs="*", help="of pages, for --pictures; all without")
    options = parser.parse_intermixed_args()
    if not checkers.are_here():
        sys.exit("site_check: axe-core and html-validate are not here: run scripts/fetch_page_checkers.sh")
    site = options.site.resolve()
    if not pages_of(site):
        sys.exit(f"site_check: there are no pages in {site}: run scripts/build_docs.sh")
    program = browser.Browser()
    try:
        if options.pictures:
            take_pictures(program, site, options.pictures, options.names)
            return 0
        with tempfile.TemporaryDirectory() as folder:
            problems = list(problems_of(program, site, pathlib.Path(folder)))
    finally:
        program.close()
    for problem in problems:
        print(problem)
    print(f"site_check: {len(pages_of(site))} pages, {len(SEARCHES)} searches, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
