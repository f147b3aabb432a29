"""Runs, their pages, and a browser that shows them."""

import json
import pathlib
import subprocess
import tempfile
import unittest

import make_log
from browser import Browser, Page

PHONE = {"width": 375, "height": 812, "touch": True}
DESKTOP = {"width": 1280, "height": 900}

ATTACK = '</script><script nonce="page">window.hacked = 1</script><img src="x" onerror="window.hacked = 1">\'"&amp;'

# What the format itself means by a text; all others are the user's.
KEYS = {"kind", "time", "format", "attempt", "step", "world", "device", "name", "versions", "host", "config", "units",
        "parameters", "full_bytes", "shard_bytes", "path", "loss", "lr", "grad_norm", "tokens", "seconds", "memory",
        "shards", "full", "gradients", "optimizer", "activations", "other", "prompt", "text", "blocked_seconds",
        "ranks", "rank", "spans", "lane", "start", "end", "reason", "error"}
WORDS = {"start", "resume", "step", "eval", "sample", "checkpoint", "timeline", "end",
         "compute", "gather", "reduce", "wait"}


def poisoned(value):
    """The same with ATTACK in each text that is the user's."""
    if isinstance(value, dict):
        return {key if key in KEYS else ATTACK + key: poisoned(part) for key, part in value.items()}
    if isinstance(value, list):
        return [poisoned(part) for part in value]
    return ATTACK + value if isinstance(value, str) and value not in WORDS else value


def poisoned_lines(lines):
    return [json.dumps(poisoned(json.loads(line))) for line in lines if line.endswith("}")]


def report(*words):
    return subprocess.run([ReportCase.tessera, "report", *map(str, words)], capture_output=True, text=True, timeout=60)


def write_log(folder, lines):
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def page_of(folder):
    done = report(folder)
    if done.returncode != 0:
        raise AssertionError(f"tessera report failed: {done.stderr}")
    return folder / "report.html"


class ReportCase(unittest.TestCase):
    tessera = ""  # the program

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

    def scratch_run(self, lines, name=""):
        return write_log(self.root / self.id() / name if name else self.root / self.id(), lines)

    def compared(self, *runs):
        """The page of several runs."""
        page = self.root / f"{self.id()}.html"
        done = report(*runs, "--out", page)
        self.assertEqual(done.returncode, 0, done.stderr)
        return page
