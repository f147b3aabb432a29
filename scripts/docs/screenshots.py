#!/usr/bin/env python3
"""Takes the pictures of the report: scripts/docs/screenshots.py RUN

Opens RUN/report.html, after `make demo` runs/demo/report.html, and writes
docs/img/report.png (the first screen) and docs/img/timeline.png (one step).
"""

import base64
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "report"))
import browser  # noqa: E402

WIDTH = 1100
FIRST_SCREEN = 770
BOX = """(() => {{ const box = document.querySelector({!r}).getBoundingClientRect();
  return [box.x + scrollX, box.y + scrollY, box.width, box.height]; }})()"""


def take(page, path, x, y, width, height):
    clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    image = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    path.write_bytes(base64.b64decode(image["data"]))


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    program = browser.Browser()
    try:
        page = browser.Page(program, pathlib.Path(sys.argv[1]) / "report.html", width=WIDTH)
        take(page, ROOT / "docs/img/report.png", 0, 0, WIDTH, FIRST_SCREEN)
        x, y, width, height = page.evaluate(BOX.format("#timeline"))
        above = 90  # its heading and its legend
        take(page, ROOT / "docs/img/timeline.png", 0, y - above, WIDTH, height + above)
    finally:
        program.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
