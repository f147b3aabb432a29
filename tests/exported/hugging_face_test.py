#!/usr/bin/env python3
"""Tests of python/tessera_export.py with models of Hugging Face.

    hugging_face_test.py RESULTS.xml [CASE[.TEST]...]
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

HERE = pathlib.Path(__file__).parent
SCRIPT = HERE.parents[1] / "python" / "tessera_export.py"
sys.path[:0] = [str(SCRIPT.parent), str(HERE.parent / "report"), str(HERE)]

import which_python

which_python.with_transformers("exported_hugging_face_test")

import junit
import torch
import transformers
from tessera_export import export, without_weights

torch.set_num_threads(1)  # several add gradients of experts in any order

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=48, max_position_embeddings=64)
SIZES = ({0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=64)},)


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"], **more))


class Wrapped(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, places):
        return self.model(tokens, position_ids=places)


def nodes_of(program, word):
    return [node for node in program.graph.nodes if word in str(node.target)]


class HuggingFace(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "model.pt2"
        torch.manual_seed(0)
        self.ids = torch.randint(0, 64, (2, 12))

    def run_script(self, *arguments):
        return subprocess.run([sys.executable, "-W", "ignore", SCRIPT, "hf", *map(str, arguments)], capture_output=True, text=True)

    def test_attention_is_causal_without_a_mask(self):
        model = llama()
        report = export(model, (self.ids,), None, SIZES, self.path)
        self.assertEqual(report.difference, {"model": 0, "eval": 0})
        attention = nodes_of(torch.export.load(self.path), "scaled_dot_product_attention")
        self.assertEqual([(node.args[3:4], node.kwargs.get("is_causal", node.args[5:6])) for node in attention],
                         [((None,), (True,))] * 2)
        self.assertTrue(model.config.use_cache)

    def test_a_padding_mask_is_part_of_the_program(self):
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, 9:] = 0
        export(llama(), (self.ids,), {"attention_mask": mask}, None, self.path)
        attention = nodes_of(torch.export.load(self.path), "scaled_dot_product_attention")
        self.assertTrue(all(node.args[3] is not None for node in attention))

    def test_sequences_can_be_packed_where_positions_are_given(self):
        model, whole = llama(initializer_range=0.5, use_cache=False), torch.arange(12).expand(2, 12)
        packed = torch.tensor([[*range(7), *range(5)]] * 2)
        expected = model(self.ids, position_ids=packed).logits
        self.assertFalse(torch.allclose(expected[:, 7:], model(self.ids, position_ids=whole).logits[:, 7:], atol=1e-3))
        for name, exported, args, kwargs in (
                ("by keyword", model, (self.ids,), {"position_ids": whole}),
                ("by position", model, (self.ids, None, whole), {}),
                ("under another name", Wrapped(model), (self.ids, whole), {})):
            with self.subTest(name):
                export(exported, args, kwargs, None, self.path, outputs=["logits"])
                given = [packed if value is whole else value for value in args]
                given_by_name = {key: packed for key in kwargs}
                result = torch.export.load(self.path).module()(*given, **given_by_name)["logits"]
                self.assertLess((result - expected).abs().max(), 1e-5)

    def test_experts_are_as_before_afterwards(self):
        config = transformers.MixtralConfig(**SMALL, num_local_experts=4)
        for dtype, implementation in ((torch.float32, "bmm"), (torch.bfloat16, "grouped_mm")):
            with self.subTest(dtype):
                model = transformers.MixtralForCausalLM(config).to(dtype)
                model.set_experts_implementation("eager")
                report = export(model, (self.ids,), None, SIZES, self.path, outputs=["logits"])
                self.assertEqual(report.difference, {"model": 0, "eval": 0})
                self.assertEqual(model.get_experts_implementation(), {"": "eager"})
                self.assertNotEqual(nodes_of(torch.export.load(self.path), implementation), [])

    def test_command_exports_a_configuration(self):
        llama().config.save_pretrained(self.folder)
        done = self.run_script(self.folder / "config.json", self.path, "--length", 32)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("has no weights: they are random, of seed 0", done.stdout)
        program = torch.export.load(self.path)
        self.assertEqual(list(program.module()(torch.zeros(5, 32, dtype=torch.int64))), ["logits"])
        self.assertEqual(sorted((int(r.lower), int(r.upper)) for r in program.range_constraints.values()),
                         [(1, 65536), (2, 32)])

    def test_command_exports_the_weights_of_a_folder(self):
        model = llama()
        model.save_pretrained(self.folder)
        done = self.run_script(self.folder, self.path, "--dtype", "bfloat16")
        self.assertEqual(done.returncode, 0, done.stderr)
        state = torch.export.load(self.path).state_dict
        self.assertEqual(set(state), set(model.state_dict()))
        self.assertTrue(all(torch.equal(value.bfloat16(), state[name]) for name, value in model.state_dict().items()))

    def test_command_leaves_the_weights_out(self):
        model = llama(tie_word_embeddings=True)
        model.save_pretrained(self.folder)
        done = self.run_script(self.folder, self.path, "--no-weights")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("whose values are not in the archive", done.stdout)
        with zipfile.ZipFile(self.path) as archive:
            weights = json.loads(archive.read("model/data/weights/model_weights_config.json"))["config"]
            sizes = {archive.getinfo("model/data/weights/" + entry["path_name"]).file_size for entry in weights.values()}
            self.assertEqual(sizes, {0})
            self.assertEqual(weights["lm_head.weight"]["path_name"], weights["model.embed_tokens.weight"]["path_name"])
            self.assertEqual(len({entry["path_name"] for entry in weights.values()}), len(weights) - 1)
            self.assertEqual(len(archive.read("model/data/constants/tensor_0")), 16)  # the rotary frequencies

    def test_command_exports_one_size_of_what_has_no_other(self):
        transformers.Mamba2Config(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=4,
            architectures=["Mamba2ForCausalLM"]).save_pretrained(self.folder)
        done = self.run_script(self.folder, self.path, "--length", 12)
        self.assertEqual(done.returncode, 1)
        self.assertIn("With --static BATCH it exports for one batch and --length alone", done.stderr)
        done = self.run_script(self.folder, self.path, "--length", 12, "--static", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(torch.export.load(self.path).module()(self.ids)["logits"].shape, (2, 12, 64))

    def test_command_refuses_what_is_not_there(self):
        done = self.run_script(self.folder / "absent", self.path)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no such folder or file. Nothing is downloaded", done.stderr)

    def test_a_model_that_fits_nowhere_is_traced(self):
        big = dict(SMALL, vocab_size=128_000, hidden_size=8192, intermediate_size=28_672, num_attention_heads=64)
        with without_weights():
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**big))
        report = export(model, (self.ids,), None, SIZES, self.path, outputs=["logits"])
        self.assertGreater(sum(p.nbytes for p in model.parameters()), 10 * 2**30)
        self.assertTrue(report.weights_elsewhere)
        self.assertLess(self.path.stat().st_size, 2**20)


def main(results, names):
    loader = unittest.defaultTestLoader
    here = sys.modules[__name__]
    tests = loader.loadTestsFromNames(names, here) if names else loader.loadTestsFromModule(here)
    return not junit.run(tests, pathlib.Path(results), "exported_hugging_face_test", "HuggingFaceTest")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
