#!/usr/bin/env python3
"""Python exports a model, C++ trains it, Python takes the weights: no name changes.

    round_trip_test.py RESULTS.xml BIN [CASE[.TEST]...]

BIN has the programs tessera and gpt.
"""

import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "examples/exported"), str(HERE.parent / "report"), str(HERE)]

import which_python

which_python.with_transformers("exported_round_trip_test")

import export_model
import junit
import safetensors.torch
import tessera_export
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers

BIN = pathlib.Path(sys.argv[2])
SIZES = ({0: torch.export.Dim("batch", min=1, max=1024), 1: torch.export.Dim("length", min=2, max=64)},)


ROWS, LENGTH = 16, 32
TOKENS = torch.arange(ROWS * LENGTH + 1) * 31 % export_model.VOCABULARY  # counts up; all windows are one batch


def batch():
    """What the ranks have together in each step, but for the order of rows."""
    return TOKENS[:-1].view(ROWS, LENGTH), TOKENS[1:].view(ROWS, LENGTH)


def loss_of(model):
    inputs, targets = batch()
    with torch.no_grad():
        logits = model(inputs)["logits"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


class RoundTrip(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        torch.manual_seed(0)

    def run_program(self, *words):
        result = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def words(self, num_ranks, archive, steps, *more):
        tokens = self.folder / "train.tokens"
        if not tokens.exists():
            header = struct.pack("<8sIIQ", b"TESSTOK1", 2, export_model.VOCABULARY, len(TOKENS))
            tokens.write_bytes(header + struct.pack(f"<{len(TOKENS)}H", *TOKENS.tolist()))
        return [str(word) for word in (
            BIN / "tessera", "run", "-n", num_ranks, BIN / "gpt", "--model", archive, "--tokens", tokens, "--validation-tokens",
            tokens, "--run", self.folder / "run", "--batch", ROWS, "--length", LENGTH, "--lr", "3e-3", "--steps", steps,
            "--checkpoint-every", 20, "--eval-every", 20, "--sample-tokens", 3, "--keep", 0, "--device", "cpu", *more)]

    def train(self, num_ranks, archive, steps, *more):
        """Losses by step, of this process."""
        log = self.folder / "run/log.jsonl"
        seen = len(log.read_text()) if log.exists() else 0
        self.run_program(*self.words(num_ranks, archive, steps, *more))
        entries = map(json.loads, log.read_text()[seen:].splitlines())
        return {entry["step"]: entry["loss"] for entry in entries if entry["kind"] == "step"}

    def kill_a_rank_at(self, step, archive):
        """Starts a long run and kills one of its ranks once a checkpoint of `step` is there."""
        launcher = subprocess.Popen(self.words(2, archive, 1_000_000), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 300
            while not self.checkpoint(step).exists():
                self.assertIsNone(launcher.poll(), "the run ended by itself")
                self.assertLess(time.monotonic(), until)
                time.sleep(0.05)
            ranks = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            self.assertNotEqual(launcher.wait(timeout=120), 0)
        finally:
            launcher.kill()
            launcher.wait()

    def checkpoint(self, step):
        return self.folder / "run/checkpoints" / f"step_{step:08}"

    def convert(self, step):
        out = self.folder / "trained"
        self.run_program(BIN / "tessera", "ckpt", "convert", self.checkpoint(step), out, "--to", "safetensors",
                         "--select", "model", "--strip-prefix", "model")
        return out

    def test_from_pretrained_takes_what_was_trained(self):
        model = export_model.llama()
        model.save_pretrained(self.folder / "pretrained")
        archive = self.folder / "llama.pt2"
        tessera_export.export(model, (batch()[0],), None, SIZES, archive, outputs=["logits"])
        first = self.train(2, archive, 60)
        self.assertEqual(list(first), list(range(1, 61)))
        self.assertAlmostEqual(first[1], loss_of(model.eval()), delta=1e-4)
        self.assertLess(first[60], 0.5 * first[1])

        trained = self.convert(60)
        shutil.copy(self.folder / "pretrained/config.json", trained)
        loaded, info = transformers.LlamaForCausalLM.from_pretrained(trained, output_loading_info=True)
        self.assertEqual([sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")], [[], [], []])
        again = self.train(4, archive, 61)  # resumes on other ranks, and says the loss of its first step
        self.assertEqual(list(again), [61])
        self.assertAlmostEqual(again[61], loss_of(loaded.eval()), delta=1e-4)

    def test_load_state_dict_takes_what_was_trained(self):
        model = export_model.Gpt().eval()
        archive = self.folder / "gpt.pt2"
        tessera_export.export(model, (batch()[0],), None, SIZES, archive)
        self.train(2, archive, 100)
        before = loss_of(model)
        model.load_state_dict(safetensors.torch.load_file(self.convert(100) / "model.safetensors"))  # strict
        self.assertLess(loss_of(model), 0.5 * before)

        other = export_model.Gpt().eval()  # and without a conversion
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=self.checkpoint(100), no_dist=True)
        other.load_state_dict(state["model"])
        self.assertEqual(loss_of(other), loss_of(model))

    def test_weights_come_from_safetensors(self):
        export_model.llama().save_pretrained(self.folder / "pretrained")
        with tessera_export.without_weights():
            empty = export_model.llama()
        archive = self.folder / "empty.pt2"
        report = tessera_export.export(empty, (batch()[0],), None, SIZES, archive, outputs=["logits"])
        self.assertTrue(report.weights_elsewhere)
        losses = self.train(2, archive, 40, "--weights", self.folder / "pretrained")
        model = transformers.LlamaForCausalLM.from_pretrained(self.folder / "pretrained").eval()
        self.assertAlmostEqual(losses[1], loss_of(model), delta=1e-4)

    def test_a_run_that_was_killed_goes_on(self):
        archive = ROOT / "examples/exported/tiny_gpt.pt2"
        self.kill_a_rank_at(20, archive)
        newest = max(int(path.name.removeprefix("step_")) for path in (self.folder / "run/checkpoints").glob("step_*"))
        losses = self.train(4, archive, newest + 100)
        self.assertEqual(list(losses)[0], newest + 1)
        self.assertLess(losses[newest + 100], max(losses[newest + 1], 0.5))

    def test_the_archive_of_the_example_is_what_its_script_makes(self):
        tessera_export.export(export_model.Gpt(), (batch()[0],), None, SIZES, self.folder / "new.pt2")
        old, new = (torch.export.load(path) for path in (ROOT / "examples/exported/tiny_gpt.pt2", self.folder / "new.pt2"))
        self.assertEqual([(name, tensor.shape) for name, tensor in old.state_dict.items()],
                         [(name, tensor.shape) for name, tensor in new.state_dict.items()])
        self.assertEqual([str(node.target) for node in old.graph.nodes], [str(node.target) for node in new.graph.nodes])


def main(results, names):
    loader = unittest.defaultTestLoader
    here = sys.modules[__name__]
    tests = loader.loadTestsFromNames(names, here) if names else loader.loadTestsFromModule(here)
    return not junit.run(tests, pathlib.Path(results), "exported_round_trip_test", "RoundTripTest")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[3:]))
