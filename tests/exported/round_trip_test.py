#!/usr/bin/env python3
"""Python exports a model, C++ trains it, Python takes the weights: no name changes.

    round_trip_test.py RESULTS.xml BIN [CASE[.TEST]...]

BIN has the programs tessera and train_exported.
"""

import os
import pathlib
import re
import shutil
import signal
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


def batch(step, num_ranks):
    """What train_exported.cpp's ranks have together."""
    starts = torch.arange(8 * num_ranks) * 31 + step * 7
    return (starts[:, None] + torch.arange(33)) % export_model.VOCABULARY


def loss_of(model, ids):
    with torch.no_grad():
        logits = model(ids[:, :32])["logits"]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


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

    def train(self, num_ranks, archive, steps, *weights):
        """Losses by step."""
        text = self.run_program(BIN / "tessera", "run", "-n", num_ranks, BIN / "train_exported", archive,
                                self.folder / "checkpoints", steps, *weights)
        return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) +loss ([\d.]+)", text)}

    def kill_a_rank_at(self, step, archive):
        """Starts a long run and kills one of its ranks once a checkpoint of `step` is there."""
        launcher = subprocess.Popen([str(word) for word in (
            BIN / "tessera", "run", "-n", 2, BIN / "train_exported", archive, self.folder / "checkpoints", 1_000_000)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 300
            while not (self.folder / "checkpoints" / f"step_{step:08}").exists():
                self.assertIsNone(launcher.poll(), "the run ended by itself")
                self.assertLess(time.monotonic(), until)
                time.sleep(0.05)
            ranks = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
            os.kill(int(ranks[-1]), signal.SIGKILL)
            self.assertNotEqual(launcher.wait(timeout=120), 0)
        finally:
            launcher.kill()
            launcher.wait()

    def convert(self, step):
        out = self.folder / "trained"
        self.run_program(BIN / "tessera", "ckpt", "convert", self.folder / "checkpoints" / f"step_{step:08}", out, "--to",
                         "safetensors", "--select", "model", "--strip-prefix", "model")
        return out

    def test_from_pretrained_takes_what_was_trained(self):
        model = export_model.llama()
        model.save_pretrained(self.folder / "pretrained")
        archive = self.folder / "llama.pt2"
        tessera_export.export(model, (batch(0, 1)[:, :16],), None, SIZES, archive, outputs=["logits"])
        first = self.train(2, archive, 60)
        self.assertEqual(list(first), [1, 20, 40, 60])
        self.assertAlmostEqual(first[1], loss_of(model.eval(), batch(0, 2)), delta=1e-4)
        self.assertLess(first[60], 0.5)

        trained = self.convert(60)
        shutil.copy(self.folder / "pretrained/config.json", trained)
        loaded, info = transformers.LlamaForCausalLM.from_pretrained(trained, output_loading_info=True)
        self.assertEqual([sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")], [[], [], []])
        again = self.train(4, archive, 61)  # resumes on other ranks, and says the loss of its first step
        self.assertEqual(list(again), [61])
        self.assertAlmostEqual(again[61], loss_of(loaded.eval(), batch(60, 4)), delta=1e-4)

    def test_load_state_dict_takes_what_was_trained(self):
        model = export_model.Gpt().eval()
        archive = self.folder / "gpt.pt2"
        tessera_export.export(model, (batch(0, 1)[:, :16],), None, SIZES, archive)
        self.train(2, archive, 100)
        before = loss_of(model, batch(100, 1))
        model.load_state_dict(safetensors.torch.load_file(self.convert(100) / "model.safetensors"))  # strict
        self.assertLess(loss_of(model, batch(100, 1)), 0.5 * before)

        other = export_model.Gpt().eval()  # and without a conversion
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=self.folder / "checkpoints/step_00000100", no_dist=True)
        other.load_state_dict(state["model"])
        self.assertEqual(loss_of(other, batch(100, 1)), loss_of(model, batch(100, 1)))

    def test_weights_come_from_safetensors(self):
        export_model.llama().save_pretrained(self.folder / "pretrained")
        with tessera_export.without_weights():
            empty = export_model.llama()
        archive = self.folder / "empty.pt2"
        report = tessera_export.export(empty, (batch(0, 1)[:, :16],), None, SIZES, archive, outputs=["logits"])
        self.assertTrue(report.weights_elsewhere)
        losses = self.train(2, archive, 40, self.folder / "pretrained")
        model = transformers.LlamaForCausalLM.from_pretrained(self.folder / "pretrained").eval()
        self.assertAlmostEqual(losses[1], loss_of(model, batch(0, 2)), delta=1e-4)

    def test_a_run_that_was_killed_goes_on(self):
        archive = ROOT / "examples/exported/tiny_gpt.pt2"
        self.kill_a_rank_at(20, archive)
        newest = max(int(path.name.removeprefix("step_")) for path in (self.folder / "checkpoints").glob("step_*"))
        losses = self.train(4, archive, newest + 100)
        self.assertEqual(list(losses)[0], newest + 1)
        self.assertLess(losses[newest + 100], max(losses[newest + 1], 0.5))

    def test_the_archive_of_the_example_is_what_its_script_makes(self):
        tessera_export.export(export_model.Gpt(), (batch(0, 1)[:, :16],), None, SIZES, self.folder / "new.pt2")
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
