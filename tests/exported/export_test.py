#!/usr/bin/env python3
"""Tests of python/tessera_export.py, with torch alone.

    export_test.py RESULTS.xml [CASE[.TEST]...]
"""

import json
import pathlib
import random
import re
import sys
import tempfile
import unittest
import unittest.mock as mock
import zipfile

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "python"), str(HERE.parent / "report"), str(HERE)]

import which_python

which_python.with_torch("exported_export_test")

import export_models as models
import junit
import numpy
import tessera_export
import torch
import torch.nn.modules.module as module_hooks
from tessera_export import ExportError, export, without_weights
from torch import nn
from torch.export import Dim

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class ExportCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "model.pt2"
        torch.manual_seed(0)

    def export(self, model, args=(X,), *more, **options):
        return export(model, args, *more, path=self.path, **options)

    def refused(self, words, model, *args, **options):
        with self.assertRaisesRegex(ExportError, words):
            self.export(model, *args, **options)
        self.assertEqual(list(self.path.parent.iterdir()), [])

    def read(self, name):
        with zipfile.ZipFile(self.path) as archive:
            self.assertEqual({entry.compress_type for entry in archive.infolist()}, {zipfile.ZIP_STORED})
            return archive.read(f"model/{name}")


class Archive(ExportCase):
    def test_holds_both_modes_over_one_set_of_weights(self):
        ids = torch.randint(0, 12, (3, 5))
        model = models.Tied()
        report = self.export(model, (ids,), None, ({0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=64)},))
        self.assertEqual(report.difference, {"model": 0, "eval": 0})
        self.assertEqual(report.notes, [])
        train, evaluate = (json.loads(self.read(f"data/weights/{name}_weights_config.json"))["config"]
                           for name in ("model", "eval"))
        self.assertEqual(train, evaluate)
        self.assertEqual(set(train), set(model.state_dict()))
        self.assertEqual(train["embedding.weight"]["path_name"], train["head.weight"]["path_name"])
        self.assertEqual(len({entry["path_name"] for entry in train.values()}), report.weights)
        stored = self.read("data/weights/" + train["middle.weight"]["path_name"])
        self.assertEqual(torch.frombuffer(bytearray(stored), dtype=torch.float32).as_strided((8, 8), (1, 8)).tolist(),
                         model.middle.weight.tolist())
        self.assertEqual(self.read("data/sample_inputs/model.pt"), b"")
        self.assertEqual(json.loads(self.read("extra/tessera.json")),
                         {"version": 1, "programs": {"train": "model", "eval": "eval"}, "weights": "archive"})
        self.assertNotIn(str(HERE.parents[1]).encode(), self.path.read_bytes())

    def test_is_what_torch_loads_with_the_same_outputs(self):
        ids = torch.randint(0, 12, (3, 5))
        model = models.Tied().train()
        self.export(model, (ids,))
        loaded = torch.export.load(self.path).module()
        torch.manual_seed(3)
        expected = model(ids)
        torch.manual_seed(3)
        self.assertTrue(torch.equal(loaded(ids), expected))

    def test_takes_keywords_and_returns_dictionaries(self):
        self.export(models.ReturnsNames(), (X,), {"scale": 2.0, "shift": torch.ones(8)})
        loaded = torch.export.load(self.path).module()
        result = loaded(X, scale=2.0, shift=torch.ones(8))
        self.assertEqual(list(result), ["y", "pair"])

    def test_keywords_are_in_the_order_of_forward(self):
        self.export(models.ReturnsNames(), (), {"shift": torch.ones(8), "x": X, "scale": torch.ones(())})
        self.assertEqual(torch.export.load(self.path).graph_signature.user_inputs, ("x", "scale", "shift"))

    def test_sizes_are_those_of_the_keyword_that_they_are_given_for(self):
        for sizes in ({"x": {0: Dim.DYNAMIC}, "scale": None, "shift": None}, ({0: Dim.DYNAMIC}, None, None)):
            self.export(models.ReturnsNames(), (), {"shift": torch.ones(8), "x": X, "scale": torch.ones(())}, sizes)
            program = torch.export.load(self.path)
            shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder"][2:]
            self.assertEqual([[isinstance(size, torch.SymInt) for size in shape] for shape in shapes],
                             [[True, False], [], [False]])

    def test_has_the_values_of_conjugated_and_negated_buffers(self):
        model = models.Conjugated()
        self.assertTrue(model.table.is_conj() and model.sine.is_neg())
        report = self.export(model)
        state = torch.export.load(self.path).state_dict
        self.assertTrue(torch.equal(state["table"], model.table))
        self.assertTrue(torch.equal(state["sine"], model.sine))
        self.assertEqual(report.weights, 4)
        self.assertTrue(model.table.is_conj() and model.sine.is_neg())

    def test_is_read_back_before_it_has_its_name(self):
        with mock.patch.object(tessera_export, "_as_stored", lambda tensor: tensor):
            self.refused("the archive does not hold 'table' of program 'model' as it is in the model", models.Conjugated())

    def test_has_the_outputs_that_were_asked_for(self):
        self.export(models.ReturnsNames(), outputs=["y"])
        self.assertEqual(list(torch.export.load(self.path).module()(X)), ["y"])
        self.path.unlink()
        self.refused(r"\['logits'\] were asked for, and the model returns \['pair', 'y'\]",
                     models.ReturnsNames(), outputs=["logits"])

    def test_without_weights_has_shapes_and_real_buffers(self):
        with without_weights():
            model = models.Tied()
            model.head.weight = model.embedding.weight
        report = self.export(model, (torch.randint(0, 12, (3, 5)),), None, ({0: Dim("batch", min=2, max=64)},))
        self.assertTrue(report.weights_elsewhere)
        self.assertTrue(model.embedding.weight.is_meta)
        self.assertEqual(json.loads(self.read("extra/tessera.json"))["weights"], "elsewhere")
        entries = json.loads(self.read("data/weights/model_weights_config.json"))["config"]
        size = {name: len(self.read("data/weights/" + entry["path_name"])) for name, entry in entries.items()}
        self.assertEqual({size[name] for name, _ in model.named_parameters()}, {0})
        self.assertEqual(size["norm.running_mean"], 32)
        self.assertEqual(entries["embedding.weight"]["path_name"], entries["head.weight"]["path_name"])
        self.assertNotEqual(entries["middle.weight"]["path_name"], entries["head.weight"]["path_name"])
        self.assertEqual(len(self.read("data/constants/tensor_0")), 4)
        self.assertEqual(torch.export.load(self.path).module()(torch.randint(0, 12, (4, 5))).shape, (4, 5, 12))

    def test_takes_a_sample_that_is_a_slice(self):
        self.export(models.Tied(), (torch.zeros(3, 33, dtype=torch.int64)[:, :5],), None,
                    ({1: Dim("length", min=2, max=64)},))
        self.assertEqual(torch.export.load(self.path).module()(torch.zeros(3, 33, dtype=torch.int64)).shape, (3, 33, 12))

    def test_name_must_end_in_pt2(self):
        with self.assertRaisesRegex(ExportError, "must end in .pt2"):
            export(nn.Linear(8, 8), (X,), path=self.path.with_suffix(".bin"))


class Model(ExportCase):
    def test_is_as_it_was(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
        model.train()
        model[1].eval()
        model[0].weight.grad = torch.ones(8, 8)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.manual_seed(5)
        self.export(model)
        self.assertEqual(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
        self.assertEqual([m.training for m in model.modules()], [True, True, False, True])
        self.assertTrue(all(torch.equal(value, model.state_dict()[name]) for name, value in before.items()))
        self.assertTrue(torch.equal(model[0].weight.grad, torch.ones(8, 8)))
        self.assertNotIn("forward", vars(model))
        ran = torch.export.load(self.path).module()
        ran(X)
        self.assertTrue(torch.equal(ran.state_dict()["1.running_mean"], before["1.running_mean"]))

    def test_has_its_own_buffer_after_forward_made_another(self):
        model = models.CountsInABuffer()
        calls = model.calls
        for sizes in (None, ({0: Dim("batch", min=2, max=64)},)):
            self.assertEqual(self.export(model, (X,), None, sizes).difference, {"model": 0, "eval": 0})
            self.assertIs(model.calls, calls)
            self.assertEqual(calls, 0)
            train, evaluate = (self.read(f"data/weights/{name}_weights_config.json") for name in ("model", "eval"))
            self.assertEqual(train, evaluate)

    def test_has_its_attributes_as_they_were(self):
        for how in ("attribute", "list", "dictionary"):
            model = models.LeavesItsLoss(how)
            losses, stats = model.losses, model.stats
            losses.append(1)
            stats["epoch"] = 2
            self.export(model)
            self.assertIs(model.losses, losses)
            self.assertIs(model.stats, stats)
            self.assertEqual((losses, stats, model.loss), ([1], {"epoch": 2}, None))
        model = models.KeepsATable()
        self.export(model, check=False)
        self.assertIsNone(model.table)

    def test_has_no_hooks_that_its_first_call_added(self):
        model = models.AddsAHookWhenFirstCalled()
        report = self.export(model)
        self.assertEqual((report.difference, report.notes), ({"model": 0, "eval": 0}, []))
        self.assertEqual((vars(model).keys() - vars(nn.Module()).keys(), len(model.layer._forward_hooks)), (set(), 0))

    def test_leaves_the_random_numbers_of_python_as_they_were(self):
        random.seed(1)
        numpy.random.seed(1)
        self.export(models.SometimesSkips(lambda: random.random() + numpy.random.rand()), check=False)
        self.assertEqual(random.random(), random.Random(1).random())
        self.assertEqual(numpy.random.rand(), numpy.random.RandomState(1).rand())

    def test_in_eval_is_exported_in_train_too(self):
        model = models.BranchesOnTraining().eval()
        report = self.export(model)
        self.assertEqual(report.nodes, {"model": 1, "eval": 2})
        self.assertFalse(model.training)


class Refuses(ExportCase):
    def test_an_autograd_function_whose_backward_matters(self):
        self.refused(r"gradient of 'layer\.weight' by .*\(export_models\.Straight\).*loses its backward",
                     models.UsesStraight())

    def test_an_autograd_function_on_an_input(self):
        self.refused(r"program 'model' differs from the model: gradient with respect to input \[0\] by .*Reversed\)",
                     models.ReversesItsInput())

    def test_an_autograd_function_in_eval(self):
        self.refused(r"program 'eval' differs from the model: gradient of 'layer\.weight' by .*Reversed\)",
                     models.ReversesInEval())

    def test_a_parameter_that_forward_changes(self):
        model = models.ChangesItsWeight()
        before = model.layer.weight.detach().clone()
        self.refused("forward changes parameter 'layer.weight' in place", model)
        self.assertTrue(torch.equal(model.layer.weight, before))

    def test_a_counter_that_matters(self):
        model = models.Counts(matters=True)
        self.refused("forward changes the attribute calls, and the next result depends on it", model)
        self.assertEqual(model.calls, 0)

    def test_a_tensor_that_is_kept_for_the_next_call(self):
        model = models.KeepsTheLast()
        last = model.last
        self.refused("forward changes the attribute last, and the next result depends on it", model)
        self.assertIs(model.last, last)
        self.assertEqual(last.tolist(), [0] * 8)

    def test_a_buffer_that_a_submodule_assigns(self):
        model = nn.Sequential(models.CountsInABuffer())
        calls = model[0].calls
        self.refused(r"differs from the model: buffer '0\.calls' .*Change buffers in place", model)
        self.assertIs(model[0].calls, calls)

    def test_random_numbers_of_python(self):
        generator, of_numpy = random.Random(1), numpy.random.default_rng(1)
        for where, draw in (("random", random.random), ("numpy.random", numpy.random.rand)):
            self.refused(f"forward draws random numbers of {where} in train.*torch.rand", models.SometimesSkips(draw))
        for where, own in (("generator", generator), ("generator", of_numpy)):
            model = models.SometimesSkips(own.random)
            model.generator = own
            self.refused(f"forward draws random numbers of the attribute {where} in train", model)
        self.refused("forward draws random numbers of random", models.DrawsFromPython())

    def test_a_branch_on_values(self):
        self.refused("(?s)BranchesOnValues in train.* does not export.*What to do: forward branches on the values",
                     models.BranchesOnValues())

    def test_backward_hooks(self):
        model = nn.Linear(8, 8)
        model.register_full_backward_hook(lambda *_: None)
        self.refused("has backward hooks", model)
        model = nn.Linear(8, 8)
        model.weight.register_hook(lambda gradient: 2 * gradient)
        self.refused("parameter 'weight' has hooks on its gradient", model)
        model = nn.Linear(8, 8)
        model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
        self.refused("parameter 'weight' has hooks on its gradient", model)

    def test_backward_hooks_of_all_modules(self):
        for register in (module_hooks.register_module_full_backward_hook,
                         module_hooks.register_module_full_backward_pre_hook):
            handle = register(lambda *_: None)
            try:
                self.refused("backward hooks are registered for all modules", nn.Linear(8, 8))
            finally:
                handle.remove()

    def test_tensors_that_are_not_plain(self):
        ones = torch.ones(8)
        for kind, tensor in (("Marked", ones.as_subclass(models.Marked)),
                             ("quantized tensor", torch.quantize_per_tensor(ones, 0.5, 0, torch.qint8)),
                             ("tensor of layout torch.sparse_coo", ones.to_sparse())):
            model = nn.Linear(8, 8)
            model.register_buffer("table", tensor)
            self.refused(f"buffer 'table' is a {kind}; C\\+\\+ reads plain dense tensors only", model)
        model = models.OneLayer()
        model.forward = lambda x: model.layer(x) * model.table.to_dense()
        model.table = ones.to_sparse()
        self.refused("constant 'table' of program 'model' is a tensor of layout torch.sparse_coo", model)

    def test_vmap(self):
        self.refused(r"program 'model' has torch\._functorch\.predispatch\.\w+ .*models.UsesVmap.*"
                     r"export_models\.py\", line \d+, in forward.*(?s:.*)Write the batch dimension out", models.UsesVmap())

    def test_graphs_that_are_not_run_in_cpp(self):
        self.refused(r"program 'model' has torch\.ops\.higher_order\.flex_attention .*line \d+.*(?s:.*)'sdpa'",
                     models.UsesFlexAttention(), (torch.randn(1, 2, 16, 8),))

    def test_what_cpp_refuses_and_nothing_else(self):
        sources = HERE.parents[1] / "src" / "exported"
        graphs = re.findall(r'(?<![.\w])name == "(\w+)"', (sources / "graph_compiler.cpp").read_text())
        self.assertEqual(set(graphs), tessera_export.GRAPHS)
        table = (sources / "python_names.cpp").read_text().split("find_node_function")[1].split("};")[0]
        functions = {(module, name) for module, name in re.findall(r'{"(_operator|math|builtins|torch)\.(\w+)",', table)}
        known = {(module, name) for module, names in tessera_export.FUNCTIONS.items() for name in names.split()}
        self.assertEqual(known - functions, {("_operator", "getitem")})  # part of a node's results in the file
        self.assertEqual(functions - known, set())

    def test_an_operator_of_python(self):
        self.refused("the operator tessera_test::doubled, which Python implements", models.UsesAnOperatorOfPython())

    def test_a_size_that_is_promised_and_baked_in(self):
        class Flat(models.OneLayer):
            def forward(self, x):
                return self.layer(x) / float(x.shape[0])

        self.refused("(?s)Constraints violated.*What to do: the model does not take every size",
                     Flat(), (X,), None, ({0: Dim("batch", min=2, max=64)},))

    def test_a_mask_that_is_kept_by_its_size(self):
        class Masked(models.OneLayer):
            masks = {}

            def forward(self, x):
                return self.layer(x) + self.masks.setdefault(x.shape[0], torch.ones(x.shape[0], 1))

        self.refused("(?s)unhashable.*What to do: forward looks something up by a dynamic size", Masked(), (X,), None,
                     ({0: Dim("batch", min=2, max=64)},))

    def test_a_buffer_without_values(self):
        with torch.device("meta"):
            model = models.Tied()
        self.refused("buffer 'scale' is on the meta device", model, (torch.zeros(3, 5, dtype=torch.int64),))

    def test_a_model_that_fails_by_itself(self):
        self.refused("Linear in train.* fails on the sample inputs by itself", nn.Linear(5, 5))


class Notes(ExportCase):
    def notes(self, model):
        return self.export(model).notes

    def test_a_block_that_gives_nothing(self):
        class Counts(models.OneLayer):
            def __init__(self):
                super().__init__()
                self.register_buffer("total", torch.zeros(8))

            def forward(self, x):
                y = self.layer(x)
                with torch.no_grad():
                    self.total.add_(y.sum(0))
                return y

        self.assertRegex(self.notes(Counts())[0], "torch.export.load cannot read it: a block of torch.no_grad .* gives nothing, in module")
        self.assertEqual(self.notes(nn.Linear(8, 8)), [])

    def test_checkpoint(self):
        self.assertRegex(self.notes(models.Checkpointed())[0], "torch.utils.checkpoint ran 1 times")

    def test_an_autograd_function_that_does_not_matter(self):
        self.assertRegex(self.notes(models.UsesDoubled())[0], "export_models.Doubled is a torch.autograd.Function")

    def test_a_counter_that_does_not_matter(self):
        self.assertRegex(self.notes(models.Counts(matters=False))[0], "the attribute calls: .* gave the same result")

    def test_a_loss_that_is_left_in_an_attribute(self):
        for how, attribute in (("attribute", "loss"), ("list", "losses"), ("dictionary", "stats")):
            for model, path in ((models.LeavesItsLoss(how), ""), (nn.Sequential(models.LeavesItsLoss(how)), "0.")):
                self.assertRegex("\n".join(self.notes(model)), f"the attribute {path}{attribute}: .*return it as an output")
        self.assertEqual(self.notes(models.LeavesItsLoss("nowhere")), [])

    def test_a_table_that_is_made_once(self):
        self.assertRegex(self.notes(models.KeepsATable())[0], "the attribute table: .* gave the same result")

    def test_forward_hooks(self):
        model = nn.Linear(8, 8)
        model.register_forward_hook(lambda module, inputs, output: 2 * output)
        self.assertRegex(self.notes(model)[0], "has forward hooks")

    def test_forward_hooks_of_all_modules(self):
        handle = module_hooks.register_module_forward_hook(lambda module, inputs, output: None)
        self.addCleanup(handle.remove)
        self.assertRegex(self.notes(nn.Linear(8, 8))[0], "forward hooks are registered for all modules")


class Comparison(ExportCase):
    def test_says_what_was_compared(self):
        report = self.export(models.Tied(), (torch.zeros(3, 5, dtype=torch.int64),))
        every = ["outputs", "gradients of 5 parameters", "buffers"]
        self.assertEqual(report.compared, {"model": every, "eval": every})
        self.assertIn("nodes, equal bit for bit: outputs, gradients of 5 parameters, buffers\n", str(report))
        report = self.export(nn.Linear(8, 8))
        self.assertEqual(report.compared["eval"], ["outputs", "gradients of 2 parameters", "gradients of 1 input"])
        report = self.export(nn.Linear(8, 8), check=False)
        self.assertRegex(str(report), "'eval': 1 nodes, not compared$")

    def test_leaves_out_gradients_that_the_model_does_not_have(self):
        report = self.export(models.UnfinishedInEval())
        self.assertEqual(report.compared["eval"], ["outputs"])
        self.assertEqual(report.notes, [f"gradients of {what} were not compared in program 'eval', because the model itself "
                                        "fails with them (not meant to be trained)" for what in ("inputs", "parameters")])
        report = self.export(models.WeighsClasses(), (X, torch.rand(8)))
        self.assertEqual(report.compared["model"], ["outputs", "gradients of 2 parameters"])
        self.assertRegex(report.notes[0], "gradients of inputs were not compared in program 'model', .*not differentiable")

    def test_takes_models_that_write_into_their_input(self):
        report = self.export(models.WritesIntoItsInput())
        self.assertEqual(report.compared["model"], ["outputs", "gradients of 2 parameters"])
        self.assertRegex(report.notes[0], "gradients of inputs were not compared .*in-place operation")

    def test_sees_a_gradient_that_only_the_program_has(self):
        self.refused("gradient of 'layer.weight' is absent in the model and torch.float32", models.StopsTheGradient())

    def test_allows_rounding_of_complex_numbers(self):
        for dtype, rounding, wrong in ((torch.complex64, 1e-7, 1e-2), (torch.complex128, 1e-15, 1e-6)):
            one = torch.randn(8, dtype=dtype).conj()
            self.assertLess(tessera_export._require_equal({"x": one}, {"x": one * (1 + rounding)}, "model", ()), 1e-6)
            with self.assertRaisesRegex(ExportError, "differs from the model: x by"):
                tessera_export._require_equal({"x": one}, {"x": one * (1 + wrong)}, "model", ())


def main(results, names):
    loader = unittest.defaultTestLoader
    here = sys.modules[__name__]
    tests = loader.loadTestsFromNames(names, here) if names else loader.loadTestsFromModule(here)
    return not junit.run(tests, pathlib.Path(results), "exported_export_test", "ExportTest")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
