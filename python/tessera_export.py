#!/usr/bin/env python3
"""Exports a PyTorch model as a .pt2 archive that Tessera trains in C++.

    import tessera_export
    report = tessera_export.export(model, (ids,), path="model.pt2")
    print(report)

The archive has the layout of torch.export.save, with two programs over one set of
weights: "model" is the model in train(), "eval" the model in eval(). So
torch.export.load("model.pt2") still works, and C++ picks by train() and eval().
Before the archive is written, outputs, buffers and every gradient of both programs are
compared with the model's own. The report says what was compared.

From a shell, for causal language models of Hugging Face (a folder or a config.json):

    python tessera_export.py hf FOLDER model.pt2

Needs torch 2.11 to 2.13, nothing else; transformers only for `hf`.
docs/exported.md explains what exports, what does not, and each message.
"""

import argparse
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import os
import pathlib
import pickle
import random
import re
import shutil
import sys
import tempfile

import torch
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

PROGRAMS = ("model", "eval")  # what train() and eval() run in C++
# How far outputs and gradients may be from the model's own, relative to the largest
# element. Most models are equal bit for bit; some take another kernel when exported.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2,
             torch.complex128: 1e-9, torch.complex64: 1e-4, torch.complex32: 1e-2}


class ExportError(RuntimeError):
    """The model does not export, or what was exported is not the model."""


@dataclasses.dataclass
class Report:
    """What export() wrote and what it saw on the way."""

    path: str
    nodes: dict = dataclasses.field(default_factory=dict)  # program -> operators
    weights: int = 0  # distinct tensors of the state dict
    weight_bytes: int = 0
    weights_elsewhere: bool = False  # the archive has their shapes only
    difference: dict = dataclasses.field(default_factory=dict)  # program -> largest, relative
    compared: dict = dataclasses.field(default_factory=dict)  # program -> what was compared
    notes: list = dataclasses.field(default_factory=list)

    def __str__(self):
        lines = [f"{self.path}: {self.weights} weights, " + (
            "whose values are not in the archive" if self.weights_elsewhere else f"{self.weight_bytes:,} bytes")]
        for program, nodes in self.nodes.items():
            seen = self.difference.get(program)
            how = "not compared" if seen is None else (
                "equal bit for bit: " if seen == 0 else f"within {seen:.1e} of the largest element: ")
            lines.append(f"  program {program!r}: {nodes} nodes, {how}" + ", ".join(self.compared.get(program, ())))
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def export(model, args=(), kwargs=None, dynamic_shapes=None, path=None, *,
           outputs=None, strict=False, check=True):
    """Exports `model` in both modes into the archive `path` and returns a Report.

    args, kwargs, dynamic_shapes and strict are those of torch.export.export. The sample
    inputs are used to trace and to compare, and are not stored. Keyword arguments are
    inputs of the program in the order of forward's parameters.
    outputs: names to keep of a model that returns a dictionary, such as ["logits"].
    check=False leaves out the comparison with the model, and what only its run shows:
    random numbers of Python and attributes that forward changes.

    The model is as it was afterwards: modes, buffers, attributes, gradients, random
    numbers. If the model is in train(), submodules that are in eval() stay so in the
    training program.
    Raises ExportError; then nothing is written.
    """
    path = pathlib.Path(path or "model.pt2")
    if path.suffix != ".pt2":
        raise ExportError(f"{path}: the name of the archive must end in .pt2")
    # Copies are dense: strides of a slice would become conditions on sizes ("length != 33").
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (tuple(args), dict(kwargs or {})))
    kwargs = _in_order_of_forward(model, kwargs)
    report = Report(str(path))
    _refuse_what_would_be_lost(model, report)
    programs, packed = {}, _may_be_packed(model, args, kwargs)
    with _kept(model), _prepared(model, outputs, report):
        weightless = any(p.is_meta for p in model.parameters())
        for name in PROGRAMS:
            if name == "eval":
                model.eval()
            elif not model.training:
                model.train()
            with _faked(model, args, kwargs, report) if weightless else contextlib.nullcontext((args, kwargs)) as given:
                with _put_back(model):  # tracing leaves tensors without values
                    programs[name] = _trace(model, *given, dynamic_shapes, strict, packed, name)
            report.nodes[name] = sum(node.op == "call_function" for node in programs[name].graph.nodes)
            if check and not weightless:
                report.difference[name] = _compare(model, programs[name], args, kwargs, name, report)
        if weightless:
            report.notes.append("the parameters are on the meta device: nothing was compared with the model, "
                                "and the archive has no weights; give C++ a safetensors file or a checkpoint")
        _note_what_python_cannot_load(programs, report)
        _write(path, programs, report)
    return report


@contextlib.contextmanager
def without_weights():
    """Modules that are constructed here get parameters on the meta device, and real
    buffers: for a model that fits nowhere. export() then writes an archive without
    weights, which C++ takes from safetensors or from a checkpoint."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


# ---- Before tracing -----------------------------------------------------------------


def _refuse_what_would_be_lost(model, report):
    """Backward hooks of Python cannot be in an archive, and a comparison would not see them."""
    of_all = torch.nn.modules.module
    if of_all._global_backward_hooks or of_all._global_backward_pre_hooks:
        raise ExportError("backward hooks are registered for all modules (register_module_full_backward_hook). They are "
                          "Python and do not export. Remove them (handle.remove()), or do in C++ what they do.")
    if of_all._global_forward_hooks or of_all._global_forward_pre_hooks:
        report.notes.append("forward hooks are registered for all modules: the operators that they ran are part of the "
                            "program, what else they did is not")
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ExportError(
                f"module {path or '(the model)'!r} ({type(module).__name__}) has backward hooks. They are Python and do "
                "not export. Remove them, or do in C++ what they do, with hooks on tensors.")
        if module._forward_hooks or module._forward_pre_hooks:
            report.notes.append(f"module {path or '(the model)'!r} has forward hooks: the operators that they ran are "
                                "part of the program, what else they did is not")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ExportError(f"parameter {name!r} has hooks on its gradient. They are Python and do not export. Remove "
                              "them (handle.remove()), or do in C++ what they do.")
    for what, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            _require_plain(f"{what} {name!r}", tensor)


def _require_plain(what, tensor):
    """C++ reads bytes, sizes and strides."""
    kind = (type(tensor.data).__name__ if type(tensor.data) is not torch.Tensor
            else "quantized tensor" if tensor.is_quantized
            else f"tensor of layout {tensor.layout}" if tensor.layout != torch.strided else None)
    if kind is not None:
        raise ExportError(f"{what} is a {kind}; C++ reads plain dense tensors only. Make it one before the export.")


def _in_order_of_forward(model, kwargs):
    """torch.export keeps the order of the caller; C++ may give them by position."""
    order = list(inspect.signature(model.forward).parameters)
    return dict(sorted(kwargs.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


class _Saved:
    """A value of Python as it is now, with what lists and dictionaries hold. It tells later
    whether the value is another, and puts back what was there."""

    def __init__(self, value):
        self.value = value
        self.held = (
            value.detach().clone() if isinstance(value, torch.Tensor)
            else {key: _Saved(item) for key, item in value.items()} if isinstance(value, dict)
            else [_Saved(item) for item in value] if isinstance(value, (list, tuple))
            else set(value) if isinstance(value, set) else None)

    def is_still(self, now):
        if type(now) is not type(self.value):
            return False
        if isinstance(now, torch.Tensor):
            return self._has_same_values(now)
        if isinstance(now, dict):
            return list(now) == list(self.held) and all(saved.is_still(now[key]) for key, saved in self.held.items())
        if isinstance(now, (list, tuple)):
            return len(now) == len(self.held) and all(saved.is_still(item) for saved, item in zip(self.held, now))
        if isinstance(now, set):
            return now == self.held
        if isinstance(now, (bool, int, float, complex, str, bytes)):
            return now == self.value or now != now
        return now is self.value

    def _has_same_values(self, now):
        if (now.shape, now.dtype, now.device) != (self.held.shape, self.held.dtype, self.held.device):
            return False
        if isinstance(now, FakeTensor) or now.is_meta or now.layout != torch.strided or now.is_quantized:
            return now is self.value
        return torch.equal(now, self.held) or _difference(now, self.held) == 0

    def put_back(self):
        """Returns the value that was saved, which holds again what it held."""
        if isinstance(self.value, torch.Tensor):
            if self.value.shape != self.held.shape or self.value.dtype != self.held.dtype:
                self.value.data = self.held
            elif not self._has_same_values(self.value):
                with torch.no_grad():
                    self.value.copy_(self.held)
        elif isinstance(self.value, dict):
            held = {key: saved.put_back() for key, saved in self.held.items()}
            if list(self.value) != list(held) or any(self.value[key] is not item for key, item in held.items()):
                self.value.clear()
                self.value.update(held)
        elif isinstance(self.value, list):
            self.value[:] = [saved.put_back() for saved in self.held]
        elif isinstance(self.value, tuple):
            for saved in self.held:
                saved.put_back()
        elif isinstance(self.value, set) and self.value != self.held:
            self.value.clear()
            self.value.update(self.held)
        return self.value


class _State:
    """What modules have besides parameters and submodules: modes, buffers, hooks (forward may
    add some when it is first called), and attributes of the model's own, such as counters,
    tables, and losses that forward leaves for the loop."""

    OF_TORCH = {*vars(torch.nn.Module()), "forward"}

    def __init__(self, model):
        self.saved = {module: {key: _Saved(value) for key, value in self._of(module).items()} for module in model.modules()}
        self.paths = {module: path + "." if path else "" for path, module in model.named_modules()}

    def _of(self, module):
        return {key: value for key, value in vars(module).items() if key not in ("_parameters", "_modules")}

    def moved(self):
        """Paths of the model's own attributes that are another now, or new. A new bool tells a model that
        it was called before."""
        return [self.paths[module] + key for module, saved in self.saved.items() for key, now in self._of(module).items()
                if key not in self.OF_TORCH
                and not (saved[key].is_still(now) if key in saved else isinstance(now, bool))]

    def put_back(self):
        for module, saved in self.saved.items():
            for key in self._of(module).keys() - saved.keys():
                del vars(module)[key]
            for key, value in saved.items():
                vars(module)[key] = value.put_back()


@contextlib.contextmanager
def _put_back(model):
    state = _State(model)
    try:
        yield state
    finally:
        state.put_back()


def _random_numbers(model):
    """States of the generators that a program cannot have, by what they are called."""
    numpy = sys.modules.get("numpy")
    states = {"random": random.getstate()}
    kinds = (random.Random,)
    if numpy is not None:
        states["numpy.random"] = numpy.random.get_state()
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, kinds):
                states[f"the attribute {path + '.' if path else ''}{key}"] = value
    return {where: pickle.dumps(state) for where, state in states.items()}


@contextlib.contextmanager
def _kept(model):
    """Restores modes, buffers, attributes and random numbers."""
    devices = sorted({t.device for t in itertools.chain(model.parameters(), model.buffers()) if t.is_cuda}, key=str)
    numpy = sys.modules.get("numpy")
    with torch.random.fork_rng(devices=devices), _put_back(model), contextlib.ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        if numpy is not None:
            undo.callback(numpy.random.set_state, numpy.random.get_state())
        yield


@contextlib.contextmanager
def _prepared(model, outputs, report):
    """What usually stands in the way of torch.export: caches, and outputs of classes that
    only Python knows. Both become plain for the time of the export."""
    own_forward = model.__dict__.get("forward")
    forward = model.forward

    @functools.wraps(forward)
    def plain_forward(*args, **kwargs):
        result = _plain(forward(*args, **kwargs))
        if outputs is None:
            return result
        if not isinstance(result, dict) or not set(outputs) <= set(result):
            has = sorted(result) if isinstance(result, dict) else type(result).__name__
            raise ExportError(f"outputs={list(outputs)!r} were asked for, and the model returns {has}")
        return {name: result[name] for name in outputs}

    with contextlib.ExitStack() as undo:
        for config in _configs(model):
            if getattr(config, "use_cache", False):
                undo.callback(setattr, config, "use_cache", True)
                config.use_cache = False
                note = "config.use_cache was off for the export: training has no cache"
                if note not in report.notes:
                    report.notes.append(note)
        _choose_experts(model, undo, report)
        model.forward = plain_forward
        try:
            yield
        finally:
            del model.forward
            if own_forward is not None:
                model.forward = own_forward


def _choose_experts(model, undo, report):
    """Mixtures of experts of Hugging Face loop over the experts that were hit, which does not
    export, unless another implementation is chosen. grouped_mm is traced in bfloat16 only."""
    can_choose = getattr(model, "_can_set_experts_implementation", None)
    if can_choose is None or not can_choose():
        return
    undo.callback(model.set_experts_implementation, model.get_experts_implementation())
    grouped = all(p.dtype == torch.bfloat16 for p in model.parameters() if p.dim() == 3)
    model.set_experts_implementation("grouped_mm" if grouped else "batched_mm")
    if not grouped:
        _note(report, "experts run as batched_mm: each token copies the weights of its experts. Export in bfloat16 for "
                      "grouped_mm, which does not")


def _configs(model):
    """The Hugging Face configurations in a model, those inside of others too."""
    found = {}

    def add(config):
        if hasattr(config, "to_dict") and id(config) not in found:
            found[id(config)] = config
            for value in vars(config).values():
                add(value)

    for module in model.modules():
        add(getattr(module, "config", None))
    return found.values()


def _plain(value):
    """Dictionaries and tuples for classes that only Python knows: ModelOutput,
    dataclasses, named tuples. None is left out of a ModelOutput, as it does itself."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    return value


def _may_be_packed(model, args, kwargs):
    """Whether positions are among the inputs: they start again where the next sequence of a row begins."""
    with contextlib.suppress(TypeError):  # the model fails by itself then
        given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
        if given.get("position_ids", kwargs.get("position_ids")) is not None:
            return True
    return any(_counts_up(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def _counts_up(tensor):
    """Whether every row is 0, 1, 2 ..., perhaps from 0 again: positions under another name."""
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.is_meta or tensor.numel() == 0 or tensor.dim() == 0:
        return False
    goes_on = (tensor.diff(dim=-1) == 1) | (tensor[..., 1:] == 0)
    return bool((tensor[..., 0] == 0).all() and goes_on.all() and tensor.any())


@contextlib.contextmanager
def _as_in_training(packed):
    """Models of Hugging Face that are traced make their masks in full, because a cache could be
    there, and call experts by an operator that Python implements, because a compiler lacks the
    other one. When they are not traced, they leave the mask to the attention operator where
    there is no padding, and multiply by groups. The program shall do what the model does."""
    masking = sys.modules.get("transformers.masking_utils")
    experts = sys.modules.get("transformers.integrations.moe")
    with contextlib.ExitStack() as undo:

        def replace(module, name, make):
            original = getattr(module, name, None)
            if original is not None:
                undo.callback(setattr, module, name, original)
                setattr(module, name, make(original, inspect.signature(original)))

        def left_to_attention(original, signature):
            def ignore(*args, **kwargs):
                bound = signature.bind(*args, **kwargs).arguments
                if bound.get("padding_mask") is None and bound.get("local_attention_size") is None:
                    query = bound.get("q_length", bound.get("query_length"))
                    if query is None or query is bound["kv_length"] or bool(query == bound["kv_length"]):
                        return True
                return original(*args, **kwargs)

            return ignore

        replace(masking, "_ignore_causal_mask_sdpa", left_to_attention)
        replace(masking, "_ignore_bidirectional_mask_sdpa", left_to_attention)
        if not packed:
            replace(masking, "find_packed_sequence_indices", lambda original, signature: lambda *args, **kwargs: None)
        replace(experts, "is_torchdynamo_compiling", lambda original, signature: lambda: False)
        yield


@contextlib.contextmanager
def _faked(model, args, kwargs, report):
    """Parameters on the meta device as fake tensors of the device of the inputs, so that
    they can be traced: shapes and no values."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in persistent:
            raise ExportError(f"buffer {name!r} is on the meta device and not part of the state dict, so its values "
                              "would be nowhere. Construct the model under tessera_export.without_weights().")
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = inputs[0].device if inputs else torch.device("cpu")
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True)
    fakes, undo = {}, []  # tied parameters stay tied
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in fakes:
                        with mode:
                            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                        fakes[tensor] = torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(
                            tensor, torch.nn.Parameter) else fake
                    undo.append((table, name, tensor))
                    table[name] = fakes[tensor]
    try:
        with mode:
            faked = pytree.tree_map_only(
                torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
                (args, kwargs))
        yield faked
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


# ---- Tracing ------------------------------------------------------------------------

# (words in torch's message, what to do)
ADVICE = (
    ("Could not guard on data-dependent expression",
     "forward branches on the values of a tensor (if x.any(), .item(), .tolist(), nonzero in a loop). Compute both "
     "sides and choose with torch.where, or use torch.cond. A mixture of experts that loops over the experts that "
     "were hit does this: run every expert and weight it, or a batched matmul."),
    ("Could not extract specialized integer from data-dependent",
     "forward makes a Python number of a tensor (.item(), int(x), .tolist()) and needs its value for a shape. Take the "
     "number from a shape or from the configuration."),
    ("Constraints violated",
     "the model does not take every size that dynamic_shapes promises. Use the dimensions that torch suggests above, "
     "narrow min and max, or leave the dimension out: it is then the size of the sample."),
    ("specialized",
     "a dimension that dynamic_shapes calls dynamic was baked in as a number. Take sizes from x.shape where they are "
     "used, sample with sizes above 1, or leave the dimension out of dynamic_shapes."),
    ("unhashable type: non-nested SymInt",
     "forward looks something up by a dynamic size: a mask or positions in a dictionary or an lru_cache by length. Make "
     "the largest one a buffer in the constructor and slice it, or compute it anew in each forward."),
    ("vmap",
     "forward uses torch.vmap, which does not serialize. Write the batch dimension out, or give the model the mask that "
     "it makes with vmap as an input."),
    ("torch.utils.checkpoint", "switch activation checkpointing off for the export; in C++, recompute does it by path."),
    ("Couldn't swap", "forward converts parameters of a module (self.layer.to(dtype)): convert them before the export, or "
     "convert the inputs."),
    ("flex_attention", "use the attention implementation 'sdpa' for the export (config._attn_implementation)."),
    ("DynamicCache", "the model returns or takes a cache: call it with use_cache=False."),
    ("fake tensor in the exported program constant's list",
     "forward uses x.data, keeps a tensor of one call for the next, or makes a tensor outside of PyTorch. Use x.detach(), "
     "and buffers for what is kept."),
    ("register_pytree_node", "an input or output is an object of a class of its own: use tensors, lists and dictionaries."),
)


def _trace(model, args, kwargs, dynamic_shapes, strict, packed, name):
    mode = _mode(name)
    try:
        with _as_in_training(packed):
            program = torch.export.export(model, tuple(args), kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
        _refuse_what_cpp_lacks(program.graph_module, name)
        return program
    except ExportError:
        raise
    except Exception as error:
        text = str(error)
        _require_model_runs(model, args, kwargs, mode)
        advice = next((what for words, what in ADVICE if words in text), None)
        raise ExportError(f"{type(model).__name__} in {mode} does not export: {_shortened(text)}"
                          + (f"\nWhat to do: {advice}" if advice else "")) from error


# What C++ runs besides operators: graphs in graphs, and Python's functions on sizes.
GRAPHS = {"wrap_with_set_grad_enabled", "wrap_with_autocast", "cond", "while_loop", "scan", "map_impl", "strict_mode", "wrap"}
FUNCTIONS = {
    "_operator": "getitem add sub mul truediv floordiv mod pow neg pos eq ne lt le gt ge and_ or_ lshift rshift abs not_",
    "math": "trunc ceil floor sqrt",
    "builtins": "max min round",
    "torch": "sym_int sym_float sym_not sym_max sym_min sym_ite sym_sqrt _sym_sqrt"}


def _refuse_what_cpp_lacks(graph_module, name):
    """Operators of torch.library.custom_op, which exist in this process only, functions of Python,
    and graphs in graphs that C++ does not know: what torch.export writes of them nobody else runs."""
    from torch._library.custom_ops import OPDEFS

    for node in _nodes(graph_module):
        operator = getattr(node.target, "_schema", None) and node.target._schema.name
        if operator in OPDEFS:
            raise ExportError(
                f"the model calls the operator {operator}, which Python implements (torch.library.custom_op): C++ does not "
                f"have it ({_place(node)}). Use operators of PyTorch, or register the operator in C++ and load its library "
                "in both processes.")
    lacking = [what for what in map(_not_in_cpp, _nodes(graph_module)) if what is not None]
    if lacking:
        what, node = min(lacking, key=lambda pair: not pair[0].startswith("torch.ops."))  # it may bring others along
        advice = next((advice for words, advice in ADVICE if words in what or words == "vmap" and "predispatch" in what),
                      "C++ runs operators of PyTorch, cond, while_loop, scan, map, and the graphs of torch.no_grad and "
                      "torch.autocast. Write the model with these.")
        raise ExportError(f"program {name!r} has {what} ({_place(node)}), which C++ does not run.\nWhat to do: {advice}")


def _note_what_python_cannot_load(programs, report):
    """torch.export.load refuses a graph in a graph that gives nothing, which torch.export makes of a
    block of torch.no_grad that only writes buffers."""
    places = {_place(node) for program in programs.values() for node in _nodes(program.graph_module)
              if getattr(node.target, "__name__", "").startswith("wrap_with") and not node.meta.get("val")}
    if places:
        report.notes.append("C++ runs the archive, but Python's torch.export.load cannot read it: a block of torch.no_grad "
                            f"or torch.autocast gives nothing, in {', '.join(sorted(places))}")


def _nodes(graph_module):
    """The calls of a graph and of the graphs in it."""
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _not_in_cpp(node):
    """None, or what the node calls and the node."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return None if node.target.name() in GRAPHS else (f"torch.ops.higher_order.{node.target.name()}", node)
    if isinstance(node.target, torch._ops.OpOverload):
        return None
    module, function = (getattr(node.target, key, "?") for key in ("__module__", "__name__"))
    known = FUNCTIONS.get(module if module in FUNCTIONS else module.split(".")[0], "")
    return None if function in known.split() else (f"{module}.{function}", node)


def _place(node):
    """The module and the line of the model that made a node."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path, kind = modules[-1] if modules else ("", None)
    text = f"module {path or '(the model)'!r}" + (f" of class {getattr(kind, '__name__', kind)}" if kind else "")
    line = _line_of_model(node)
    return f"{text}, {line}" if line else text


def _require_model_runs(model, args, kwargs, mode):
    """Where tracing failed, the model itself may be what fails."""
    if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        return
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(f"{type(model).__name__} in {mode} fails on the sample inputs by itself, before any export: "
                          f"{_shortened(str(error))}") from error


def _shortened(text, limit=1200):
    text = text.strip()
    return text if len(text) <= limit else text[:limit] + " ..."


# ---- Comparing ----------------------------------------------------------------------


class _Witness(contextlib.ExitStack):
    """Sees what runs in the model and leaves no trace in a program."""

    def __init__(self):
        super().__init__()
        self.functions = set()  # classes derived from torch.autograd.Function
        self.checkpoints = 0

    def __enter__(self):
        witness, apply = self, torch.autograd.Function.__dict__["apply"]

        def seen(cls, *args, **kwargs):
            if cls.__module__ == "torch.utils.checkpoint":
                witness.checkpoints += 1
            elif not cls.__module__.startswith("torch."):
                witness.functions.add(f"{cls.__module__}.{cls.__qualname__}")
            return apply.__get__(None, cls)(*args, **kwargs)

        torch.autograd.Function.apply = classmethod(seen)
        self.callback(setattr, torch.autograd.Function, "apply", apply)
        generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator

        def seen_generator(*args, **kwargs):
            witness.checkpoints += 1
            return generator(*args, **kwargs)

        torch.utils.checkpoint._checkpoint_without_reentrant_generator = seen_generator
        self.callback(setattr, torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", generator)
        return self


def _compare(model, program, args, kwargs, name, report):
    """Compares the program with its model, with the sample and at other sizes: outputs, buffers
    afterwards, gradients of parameters and inputs. Gradients that the model itself does not have
    are left out, with a note. Returns the largest relative difference."""
    exported = program.module()
    outcomes = {}
    # Without gradients operators may go another way, and this is how models are evaluated.
    largest = 0.0 if name == "model" else _compare_once(model, exported, program, args, kwargs, (), name, report, outcomes)
    gradients = ("parameters", "inputs") if any(map(_can_have_gradient, pytree.tree_leaves((args, kwargs)))) else ("parameters",)
    while gradients:
        try:
            largest = max(largest, _compare_once(model, exported, program, args, kwargs, gradients, name, report, outcomes))
            break
        except _ModelFails as failure:
            if name == "model" and gradients == ("parameters",):
                raise
            _note(report, f"gradients of {gradients[-1]} were not compared in program {name!r}, because the model itself fails "
                          f"with them ({_shortened(str(failure.__cause__), 200)})")
            gradients = gradients[:-1]
    report.compared[name] = [
        text for text in ("outputs" if any(what.startswith("output ") for what in outcomes) else "",
                          _counted(outcomes, "gradient of ", "parameter"), _counted(outcomes, "gradient with", "input"),
                          "buffers" if any(what.startswith("buffer ") for what in outcomes) else "") if text]
    return largest


def _counted(outcomes, prefix, kind):
    count = sum(what.startswith(prefix) and value is not None for what, value in outcomes.items())
    return f"gradients of {count} {kind}{'s' * (count > 1)}" if count else ""


def _can_have_gradient(leaf):
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _compare_once(model, exported, program, args, kwargs, gradients, name, report, outcomes):
    """Returns the largest relative difference, and adds what the model gives to outcomes."""
    with _Witness() as witness:
        expected = _outcome_of_model(model, args, kwargs, gradients, name, report)
    if witness.checkpoints and name == "model":
        _note(report, f"torch.utils.checkpoint ran {witness.checkpoints} times and is not part of the program: nothing "
                      "is recomputed unless C++ asks for it, by path")
    try:
        actual = _outcome(exported, model, args, kwargs, gradients)
    except Exception as error:
        raise ExportError(f"program {name!r} fails on the sample inputs, and the model does not: "
                          f"{_shortened(str(error))}") from error
    largest = _require_equal(expected, actual, name, witness.functions)
    outcomes.update(expected)
    for function in sorted(witness.functions) if gradients else ():
        _note(report, f"{function} is a torch.autograd.Function: its backward is not part of the program; derivatives of "
                      "its forward gave the same gradients here")
    try:
        return max(largest, _at_other_sizes(model, exported, program, args, kwargs, gradients, name))
    except _Refused as refused:
        _note(report, f"compared at the size of the sample only: {refused}")
        return largest


class _ModelFails(ExportError):
    pass


def _outcome_of_model(model, args, kwargs, gradients, name, report):
    """What the model gives, and an error where its forward changes or draws what a program cannot."""
    parameters = _Saved(dict(model.named_parameters()))
    with _put_back(model) as state:
        drawn = _random_numbers(model)
        try:
            expected = _outcome(model, model, args, kwargs, gradients)
        except Exception as error:
            raise _ModelFails(f"{type(model).__name__} exports, and fails by itself on the sample inputs: "
                              f"{_shortened(str(error))}") from error
        changed = [n for n, p in model.named_parameters() if not parameters.held[n].is_still(p)]
        if changed:
            parameters.put_back()
            raise ExportError(
                f"forward changes parameter {changed[0]!r} in place. In C++ the parameter may be sharded, and the change "
                "would be lost. Make it a buffer, or change it in the training loop, after the optimizer.")
        drawn = [where for where, numbers in _random_numbers(model).items() if numbers != drawn.get(where)]
        if drawn:
            raise ExportError(
                f"forward draws random numbers of {' and '.join(drawn)} in {_mode(name)}. A program has the one number, and the "
                "branch, of the export. Draw with torch.rand and choose with torch.where, or switch off what draws.")
        moved = state.moved()
        if moved:
            try:
                _require_equal(expected, _outcome(model, model, args, kwargs, gradients), name, ())
            except ExportError:
                raise ExportError(
                    f"forward changes the attribute {', '.join(moved)}, and the next result depends on it. A program keeps the "
                    "value that it was exported with. Make it a buffer (register_buffer) and change that in place.") from None
            _note(report, f"forward changes the attribute {', '.join(moved)}: the program does not, and a second call gave the "
                          "same result. If the loop reads it after forward, as a loss, return it as an output")
    return expected


def _mode(name):
    return "train()" if name == "model" else "eval()"


def _note(report, text):
    if text not in report.notes:
        report.notes.append(text)


def _require_equal(expected, actual, name, functions):
    """Returns the largest relative difference; raises where it is not allowed."""
    largest = 0.0
    for what, one in expected.items():
        other = actual.get(what)
        if (one is None) != (other is None) or (one is not None and (one.shape, one.dtype) != (other.shape, other.dtype)):
            raise ExportError(f"program {name!r} differs from the model: {what} is {_described(one)} in the model and "
                              f"{_described(other)} in the program." + _suspects(what, functions))
        if one is None or torch.equal(one, other):
            continue
        difference = _difference(one, other)
        if not difference <= TOLERANCE.get(one.dtype, 0.0):
            raise ExportError(
                f"program {name!r} differs from the model: {what} by {difference:.2e} of its largest element (allowed: "
                f"{TOLERANCE.get(one.dtype, 0.0):.0e})." + _suspects(what, functions))
        largest = max(largest, difference)
    return largest


def _suspects(what, functions):
    if what.startswith("buffer"):
        return (" Change buffers in place (self.n.add_(1)): where a submodule assigns one (self.n = self.n + 1), torch.export "
                "does not see it.")
    if functions:
        return (f" The model uses torch.autograd.Function ({', '.join(sorted(functions))}): torch.export keeps its forward "
                "and loses its backward. Write it with differentiable operators, or with x + (y - x).detach() where the "
                "gradient shall pass by.")
    return (" Something in forward was not traced: state of Python that changes, a random number from Python or numpy, or "
            ".data and .detach() where a gradient should pass. Look at the operators with print(torch.export.export(...)).")


def _described(tensor):
    return "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _difference(one, other):
    one, other = one.detach(), other.detach()
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return 0.0
    finite = one[one.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return float(torch.where(same, torch.zeros_like(one), (one - other).abs()).max()) / max(scale, 1e-12)


def _outcome(run, model, args, kwargs, gradients):
    """Outputs, the gradients that are asked for ("parameters", "inputs") and buffers afterwards,
    by what they are called. The loss is a fixed random combination of all outputs. Buffers are
    put back."""
    inputs = {}

    def given(path, leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach().clone()
        if "inputs" in gradients and _can_have_gradient(leaf):
            inputs[f"gradient with respect to input {pytree.keystr(path[1:])}"] = leaf.requires_grad_()
        return leaf

    with contextlib.ExitStack() as undo:
        for module in itertools.chain(model.modules(), run.modules()):
            undo.callback(_Saved(module._buffers).put_back)
        undo.enter_context(torch.set_grad_enabled(bool(gradients)))
        args, kwargs = pytree.tree_map_with_path(given, (tuple(args), kwargs))
        torch.manual_seed(20)
        result = run(*args, **kwargs)
        outcome, loss = {}, None
        for path, leaf in pytree.tree_leaves_with_path(result):
            if isinstance(leaf, torch.Tensor):
                outcome["output " + (pytree.keystr(path) or "(the only one)")] = leaf
                if leaf.requires_grad:
                    real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
                    draw = torch.Generator().manual_seed(len(outcome))
                    weight = torch.randn(real.shape, generator=draw, dtype=torch.float64).to(real.device)
                    part = (real.double() * weight).sum()
                    loss = part if loss is None else loss + part
        if gradients:
            named = dict(run.named_parameters(remove_duplicate=False))
            names = [n for n, p in model.named_parameters() if p.requires_grad and n in named]
            wanted = {f"gradient of {n!r}": named[n] for n in names} | inputs
            found = [None] * len(wanted) if loss is None else torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
            outcome.update(zip(wanted, found))
        for n, buffer in run.named_buffers(remove_duplicate=False):
            if n in dict(model.named_buffers(remove_duplicate=False)):
                outcome[f"buffer {n!r}"] = buffer.detach().clone()
    return outcome


class _Refused(Exception):
    pass


def _at_other_sizes(model, exported, program, args, kwargs, gradients, name):
    """The same comparison at sizes that the sample does not have: a size that was baked in
    by mistake shows. 0 if nothing is dynamic."""
    refused = None
    for change in (lambda size: size + 1, lambda size: 2 * size, lambda size: size - 1):
        resized = _resized(program, args, kwargs, change)
        if resized is None:
            return 0.0
        try:
            with _put_back(model):
                expected = _outcome(model, model, *resized, gradients)
        except Exception as error:
            refused = _Refused(f"the model does not take another ({_shortened(str(error), 200)})")
            continue
        try:
            actual = _outcome(exported, model, *resized, gradients)
        except Exception as error:
            refused = _Refused(f"the program refuses another that the model takes ({_shortened(str(error), 200)})")
            continue
        return _require_equal(expected, actual, name, ())
    raise refused


def _resized(program, args, kwargs, change):
    """Inputs with every dynamic size changed as far as its range allows, made of the
    sample's own elements; None where no size is dynamic."""
    by_name = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    wanted = [by_name.get(name) for name in program.graph_signature.user_inputs]
    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    if len(wanted) != len(leaves):
        return None
    sizes = {}
    for leaf, fake in zip(leaves, wanted):
        if isinstance(leaf, torch.Tensor) and isinstance(fake, torch.Tensor):
            for size, dim in zip(leaf.shape, fake.shape):
                expression = getattr(getattr(dim, "node", None), "expr", None)
                if expression is not None and expression.is_Symbol and expression not in sizes:
                    limits = program.range_constraints.get(expression)
                    new = change(size)
                    sizes[expression] = new if limits is None or limits.lower <= new <= limits.upper else size
    if not sizes:
        return None

    def resize(leaf, fake):
        if isinstance(leaf, torch.Tensor) and isinstance(fake, torch.Tensor):
            for axis, dim in enumerate(fake.shape):
                expression = getattr(getattr(dim, "node", None), "expr", None)
                if expression is not None:
                    new = int(expression.subs(sizes))
                    leaf = leaf.index_select(axis, torch.arange(new, device=leaf.device) % leaf.shape[axis])
        return leaf

    return pytree.tree_unflatten([resize(*pair) for pair in zip(leaves, wanted)], tree)


# ---- Writing ------------------------------------------------------------------------


def _write(path, programs, report):
    """Writes beside `path` and renames: under its name there is a whole archive or none."""
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    path.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        partial = os.path.join(folder, path.name)
        with PT2ArchiveWriter(partial) as archive:
            _write_programs(archive, programs, report)
        _read_back(partial, programs)
        os.replace(partial, path)
    finally:
        shutil.rmtree(folder)


def _write_programs(archive, programs, report):
    from torch._export.serde.serialize import serialize
    from torch.export.pt2_archive import constants as layout

    # Newer versions can be told not to pickle what is written here already.
    leave_out = {option: False for option in ("serialize_state_dict", "serialize_constants", "serialize_example_inputs")
                 if option in inspect.signature(serialize).parameters}
    weights = _Payloads(archive, layout.WEIGHTS_DIR, layout.WEIGHT_FILENAME_PREFIX)
    tensors = _Payloads(archive, layout.CONSTANTS_DIR, layout.TENSOR_CONSTANT_FILENAME_PREFIX, made_anew=True)
    for name, program in programs.items():
        for constant, value in program.constants.items():
            if not isinstance(value, torch.Tensor):
                raise ExportError(f"constant {constant!r} of program {name!r} is a {type(value).__name__}, which would be "
                                  "stored as a pickle; C++ reads tensors only.")
            _require_plain(f"constant {constant!r} of program {name!r}", value)
        archive.write_string(layout.WEIGHTS_CONFIG_FILENAME_FORMAT.format(name), weights.config(program.state_dict))
        archive.write_string(layout.CONSTANTS_CONFIG_FILENAME_FORMAT.format(name), tensors.config(program.constants))
        program.example_inputs = None
        _shorten_origins(program.graph_module)
        try:
            serialized = serialize(program, **leave_out)
        except Exception as error:
            advice = next((what for words, what in ADVICE if words in str(error)), None)
            raise ExportError(f"program {name!r} cannot be written: {_shortened(str(error))}"
                              + (f"\nWhat to do: {advice}" if advice else "")) from error
        archive.write_bytes(layout.MODELS_FILENAME_FORMAT.format(name), serialized.exported_program)
        archive.write_bytes(layout.SAMPLE_INPUTS_FILENAME_FORMAT.format(name), b"")
    report.weights, report.weight_bytes, report.weights_elsewhere = weights.count, weights.bytes, weights.absent
    about = {"version": 1, "programs": {"train": "model", "eval": "eval"},
             "weights": "elsewhere" if weights.absent else "archive"}
    archive.write_string(f"{layout.EXTRA_DIR}tessera.json", json.dumps(about))


def _read_back(path, programs):
    """Compares every tensor that the file describes with the program's, byte by byte."""
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE
    from torch.export.pt2_archive import constants as layout
    from torch.export.pt2_archive._package import PT2ArchiveReader

    seen = set()  # both programs have the same weights
    with PT2ArchiveReader(path) as archive:
        for name, program in programs.items():
            for folder, config, tensors in (
                    (layout.WEIGHTS_DIR, layout.WEIGHTS_CONFIG_FILENAME_FORMAT, program.state_dict),
                    (layout.CONSTANTS_DIR, layout.CONSTANTS_CONFIG_FILENAME_FORMAT, program.constants)):
                entries = json.loads(archive.read_string(config.format(name)))["config"]
                for key, tensor in tensors.items():
                    if isinstance(tensor, FakeTensor) or tensor.numel() == 0 or (id(tensor), json.dumps(entries[key])) in seen:
                        continue
                    seen.add((id(tensor), json.dumps(entries[key])))
                    meta = entries[key]["tensor_meta"]
                    dtype, offset = _SERIALIZE_TO_TORCH_DTYPE[meta["dtype"]], meta["storage_offset"]["as_int"]
                    sizes, strides = ([number["as_int"] for number in meta[what]] for what in ("sizes", "strides"))
                    values = bytearray(archive.read_bytes(folder + entries[key]["path_name"]))
                    values = torch.frombuffer(values, dtype=dtype, count=len(values) // dtype.itemsize)
                    stored = values.as_strided(sizes, strides, offset)
                    if not torch.equal(_bytes(stored), _bytes(tensor)):
                        raise ExportError(f"the archive does not hold {key!r} of program {name!r} as it is in the model. Make "
                                          "it a plain tensor before the export (tensor.clone()); if it is one, the disk or "
                                          "the exporter is at fault.")


def _bytes(tensor):
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _as_stored(tensor):
    """A conjugated or negated tensor is its storage and a bit, which files do not have."""
    return tensor.resolve_conj().resolve_neg()


def _shorten_origins(graph_module):
    """Leaves of each node's stack trace the line of the model that made it. Whole traces
    are most of a graph's size, and folders of this machine are nobody's business."""
    for node in graph_module.graph.nodes:
        line = _line_of_model(node)
        if line:
            node.meta["stack_trace"] = line
    for child in graph_module.children():
        if isinstance(child, torch.fx.GraphModule):
            _shorten_origins(child)


def _line_of_model(node):
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
    if not frames:
        return None
    file, line, function = frames[-1]
    return f'File "{"/".join(pathlib.PurePath(file).parts[-2:])}", line {line}, in {function}'


class _Payloads:
    """Tensors of the archive, each storage once: tied weights and the weights of the second
    program name the payload of the first. A fake tensor has a payload of no bytes.
    made_anew: each export makes the tensors anew, so that they are compared by name too."""

    def __init__(self, archive, folder, prefix, made_anew=False):
        self.archive, self.folder, self.prefix, self.made_anew = archive, folder, prefix, made_anew
        self.written = {}  # storage, dtype -> payload
        self.by_name = {}  # name, dtype -> payload and values
        self.count = self.bytes = 0
        self.absent = False  # whether a tensor was fake
        self.alive = []  # storages whose addresses are keys

    def config(self, tensors):
        from torch._export.serde.serialize import _dataclass_to_dict, serialize_tensor_meta

        entries = {}
        for name, tensor in tensors.items():
            stored = _as_stored(tensor)
            entries[name] = {
                "path_name": self.payload(name, stored, self.made_anew or stored is not tensor),
                "is_param": isinstance(tensor, torch.nn.Parameter),
                "use_pickle": False,
                "tensor_meta": _dataclass_to_dict(serialize_tensor_meta(stored)),
            }
        return json.dumps({"config": entries})

    def payload(self, name, tensor, made_anew):
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        if key in self.written:
            return self.written[key]
        fake = isinstance(tensor, FakeTensor)
        self.absent = self.absent or fake
        values = b"" if fake else storage.cpu()
        known = self.by_name.get((name, tensor.dtype))
        if known is not None and self.same(known[1], values):
            self.written[key] = known[0]
        else:
            self.written[key] = f"{self.prefix}{self.count}"
            self.count += 1
            self.bytes += len(values)
            self.archive.archive_file.write_record(self.folder + self.written[key], values, len(values))
            if made_anew or fake:
                self.by_name[name, tensor.dtype] = (self.written[key], values)
        self.alive.append(storage)
        return self.written[key]

    @staticmethod
    def same(one, other):
        if len(one) != len(other) or len(one) == 0:
            return len(one) == len(other)
        return torch.equal(*(torch.tensor([], dtype=torch.uint8).set_(values) for values in (one, other)))


# ---- Command line -------------------------------------------------------------------


def _export_hugging_face(options):
    import transformers

    source = pathlib.Path(options.source)
    if not source.exists():
        raise ExportError(f"{source}: no such folder or file. Nothing is downloaded; give a folder with config.json, or "
                          "a config.json.")
    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    dtype = getattr(torch, options.dtype)
    has_weights = source.is_dir() and any(source.glob("*.safetensors")) or source.is_dir() and any(source.glob("pytorch_model*"))
    make = transformers.AutoModelForCausalLM
    torch.manual_seed(options.seed)
    with without_weights() if options.no_weights else contextlib.nullcontext():
        if has_weights and not options.no_weights:
            model = make.from_pretrained(source, local_files_only=True, dtype=dtype)
        else:
            model = make.from_config(config, dtype=dtype)
    text = config.get_text_config()
    length = options.length or getattr(text, "max_position_embeddings", None) or 1024
    ids = torch.randint(0, text.vocab_size, (2, min(length, 16)))
    shapes = None
    if options.static:
        ids = torch.randint(0, text.vocab_size, (options.static, length))
    else:
        shapes = ({0: torch.export.Dim("batch", min=1, max=options.batch),
                   1: torch.export.Dim("length", min=2, max=length)},)
    model.train()
    try:
        report = export(model, (ids,), None, shapes, options.out, outputs=["logits"], check=not options.no_check)
    except ExportError as error:
        if shapes is None or "does not export" not in str(error):
            raise
        raise ExportError(f"{error}\nThe command exports for any batch and length. With --static BATCH it exports for one "
                          "batch and --length alone, which a model that cuts its input into chunks needs.") from error
    if not has_weights and not options.no_weights:
        report.notes.append(f"{source} has no weights: they are random, of seed {options.seed}")
    return report


def main():
    parser = argparse.ArgumentParser(description="Exports Python models for training in C++.")
    commands = parser.add_subparsers(dest="command", required=True)
    hf = commands.add_parser("hf", help="a causal language model of Hugging Face, from a local folder or config.json")
    hf.add_argument("source", help="folder with config.json and perhaps weights, or a config.json")
    hf.add_argument("out", help="archive to write, .pt2")
    hf.add_argument("--length", type=int, help="longest sequence (default: max_position_embeddings)")
    hf.add_argument("--batch", type=int, default=65536, help="largest batch (default: %(default)s)")
    hf.add_argument("--static", type=int, metavar="BATCH", help="export for this batch and --length only")
    hf.add_argument("--dtype", default="float32", help="dtype of weights and computation (default: %(default)s)")
    hf.add_argument("--seed", type=int, default=0, help="of random weights, where the folder has none")
    hf.add_argument("--no-weights", action="store_true", help="for a model that fits nowhere: shapes only")
    hf.add_argument("--no-check", action="store_true", help="do not compare with the model")
    options = parser.parse_args()
    try:
        print(_export_hugging_face(options))
    except ExportError as error:
        sys.exit(f"tessera_export: {error}")


if __name__ == "__main__":
    main()
