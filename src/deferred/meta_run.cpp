#include "deferred/meta_run.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <optional>
#include <utility>

#include "deferred/deferred_tensor.h"
#include "deferred/replay.h"
#include "libtorch/autograd_compat.h"

namespace tessera::deferred {
namespace {

namespace autograd = torch::autograd;

at::Tensor on_meta(const at::Tensor& real) {
  return at::empty_strided(
      real.sizes(),
      real.strides(),
      at::device(at::kMeta).dtype(real.scalar_type()));
}

/// Returns the arguments for the meta device, and adds to `twins` the tensors
/// that stand for those with memory.
torch::jit::Stack meta_arguments(
    OperatorCall& call,
    at::Device device,
    std::vector<Twins>& twins) {
  torch::jit::Stack arguments = copy_values(call.arguments);
  const auto set = [&](const char* name, const c10::IValue& value) {
    if (const auto index = call.schema.argumentIndexWithName(name)) {
      arguments[*index] = value;
    }
  };
  const c10::IValue* requested = call.argument("device");
  const bool names_device = requested != nullptr && requested->isDevice();
  if (names_device || call.deferred.empty()) {
    set("device", c10::Device(c10::kMeta));
  }
  set("pin_memory", c10::IValue());
  for (c10::IValue& value : arguments) {
    if (value.isGenerator()) {
      value = c10::IValue();
    }
  }
  // On the meta device, to() finds its argument on the right device and returns
  // it unchanged.
  if (names_device && !call.deferred.empty() &&
      final_device(call.deferred.front().tensor) != device) {
    set("copy", true);
  }
  for (const Input& input : call.real) {
    // Scalars on the CPU go with any device, and some operators read them.
    if (input.tensor.dim() > 0 || !input.tensor.is_cpu()) {
      twins.push_back({on_meta(input.tensor), input.tensor});
      put(arguments, input.place, twins.back().meta);
    }
  }
  return arguments;
}

/// The argument that a result is identical to, as in-place operators return it.
std::optional<size_t> argument_returned(
    const c10::FunctionSchema& schema,
    const c10::Argument& result) {
  const auto* alias = result.alias_info();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && other != nullptr &&
        *other == *alias) {
      return i;
    }
  }
  return std::nullopt;
}

/// Whether the results cannot be computed without values.
bool reads_values(const OperatorCall& call) {
  for (const c10::Argument& result : call.schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
      return true;
    }
  }
  return call.op.hasTag(at::Tag::data_dependent_output) ||
      call.op.hasTag(at::Tag::dynamic_output_shape);
}

/// Makes new results require gradients if they do in plain construction. They
/// have no history: backward through them is an error.
void set_broken_history(
    const OperatorCall& call,
    const std::vector<at::Tensor>& made) {
  bool requires_grad = false;
  for (const auto* inputs : {&call.deferred, &call.real}) {
    for (const Input& input : *inputs) {
      requires_grad = requires_grad || input.tensor.requires_grad();
    }
  }
  if (!requires_grad || !at::GradMode::is_enabled()) {
    return;
  }
  const auto node = libtorch::make_node<autograd::Error>(
      "gradients do not flow through operators on deferred tensors",
      autograd::edge_list());
  for (const at::Tensor& tensor : made) {
    if (autograd::isDifferentiableType(tensor.scalar_type())) {
      autograd::set_history(tensor, node);
    }
  }
}

/// Results of an operator that has no kernel for the meta device: it is run on
/// memory, with the values that its arguments will have, for their shapes.
torch::jit::Stack results_by_running(OperatorCall& call, at::Device device) {
  if (reads_values(call)) {
    call.fail(kNoValues);
  }
  const auto& returns = call.schema.returns();
  std::vector<std::optional<size_t>> returned;
  torch::jit::Stack results;
  for (const c10::Argument& result : returns) {
    returned.push_back(argument_returned(call.schema, result));
    if (returned.back()) {
      results.push_back(call.arguments[*returned.back()]);
    }
  }
  for (const Input& input : call.deferred) {
    if (call.schema.arguments()[input.place.index].is_out()) {
      call.fail(
          "LibTorch has no meta kernel for this operator, so the shape of `out` is unknown. Use the operator that returns a new tensor.");
    }
  }
  if (results.size() == returns.size()) {
    return results; // in place: no shape changes
  }

  results = copy_values(call.arguments);
  std::vector<Twins> twins;
  for (const Input& input : call.deferred) {
    twins.push_back({input.tensor, replay(input.tensor)});
    put(results, input.place, twins.back().real);
  }
  {
    const PlainScope plain;
    GeneratorStates states;
    if (call.is_random()) {
      states.keep(generator_of(call, device));
    }
    call.op.callBoxed(&results);
  }

  std::vector<at::Tensor> made;
  const auto substitute = [&](const Place& place, const at::Tensor& real) {
    if (returned[place.index]) {
      return call.arguments[*returned[place.index]].toTensor();
    }
    for (const Twins& pair : twins) {
      if (real.is_alias_of(pair.real)) {
        return pair.meta.as_strided(
            real.sizes(), real.strides(), real.storage_offset());
      }
    }
    for (const Input& input : call.real) {
      if (real.is_alias_of(input.tensor)) {
        return real;
      }
    }
    made.push_back(on_meta(real));
    return made.back();
  };
  const torch::jit::Stack real_results = copy_values(results);
  for_each_tensor(
      real_results, [&](const Place& place, const at::Tensor& real) {
        put(results, place, substitute(place, real));
      });
  set_broken_history(call, made);
  return results;
}

} // namespace

MetaResults run_on_meta(OperatorCall& call, at::Device device) {
  MetaResults results;
  results.values = meta_arguments(call, device, results.twins);
  try {
    AllowPointers pointers;
    for (const Input& input : call.deferred) {
      pointers.add(input.tensor.storage());
    }
    call.op.callBoxed(&results.values);
  } catch (const c10::NotImplementedError&) {
    results.values = results_by_running(call, device);
  }
  return results;
}

std::vector<Record::Slot> defer_results(
    const OperatorCall& call,
    const std::shared_ptr<Tape>& tape,
    at::Device device,
    MetaResults& results) {
  std::vector<Record::Slot> outputs;
  const auto settle = [&](const Place& place, const at::Tensor& result) {
    if (find_deferred(result) != nullptr) {
      add_deferred_key(result);
      return;
    }
    if (!result.has_storage() || result.layout() != at::kStrided) {
      call.fail(
          "its result is not a dense tensor, and only dense tensors can be deferred. Do this after materialize() or sharding.");
    }
    for (const Twins& pair : results.twins) {
      if (result.is_alias_of(pair.meta)) {
        put(results.values,
            place,
            pair.real.as_strided(
                result.sizes(),
                result.strides(),
                pair.real.storage_offset() + result.storage_offset()));
        return;
      }
    }
    for (const Input& input : call.real) {
      if (result.is_alias_of(input.tensor)) {
        return;
      }
    }
    if (!result.is_meta()) {
      call.fail(kNoValues);
    }
    if (result.is_inference()) {
      call.fail(
          "inference mode is on, and its tensors cannot be deferred. Construct the model outside c10::InferenceMode.");
    }
    defer(result, tape, device);
    outputs.push_back({place, ref_to(result)});
  };
  const torch::jit::Stack original = copy_values(results.values);
  for_each_tensor(original, settle);
  return outputs;
}

} // namespace tessera::deferred
