#include <tessera/error.h>

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "exported/regions.h"

namespace tessera::exported {
namespace {

using c10::IValue;

/// What the runs of one call share.
struct RegionCall {
  RunScope scope;
  std::vector<IValue> inputs; // without the tensors
  std::vector<std::pair<uint32_t, at::Tensor>> weights_before;
  std::vector<IValue> outputs; // of the first run, without the tensors
  bool has_run = false;
};

/// The weights as they were before the first run, in copies.
RunScope scope_before(const RegionCall& call) {
  if (call.weights_before.empty()) {
    return call.scope;
  }
  auto weights = std::make_shared<std::vector<at::Tensor>>(*call.scope.weights);
  for (const auto& [index, before] : call.weights_before) {
    (*weights)[index] = before.clone();
  }
  return {std::move(weights), call.scope.code};
}

/// How often each tensor has been written to.
std::vector<int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const bool counts = tensor.defined() && !tensor.is_inference();
    versions.push_back(counts ? tensor._version() : 0);
  }
  return versions;
}

std::vector<at::Tensor> run_region(
    const Code& code,
    RegionCall& call,
    const std::vector<at::Tensor>& tensors) {
  std::vector<IValue> inputs = call.inputs;
  size_t next = 0;
  for (IValue& input : inputs) {
    if (input.isTensor()) {
      input = tensors[next++];
    }
  }
  const bool is_first = !call.has_run;
  call.has_run = true;
  std::vector<IValue> outputs = exported::run(
      code, is_first ? call.scope : scope_before(call), std::move(inputs));
  std::vector<at::Tensor> results;
  for (IValue& output : outputs) {
    if (output.isTensor()) {
      results.push_back(output.toTensor());
      output = at::Tensor();
    }
  }
  if (is_first) {
    call.outputs = std::move(outputs);
  }
  return results;
}

} // namespace

void RecomputeStep::run(Frame& frame) const {
  std::vector<IValue> values = frame.take_all(operands);
  if (!at::GradMode::is_enabled()) {
    frame.set_all(
        results, exported::run(first, frame.scope(), std::move(values)));
    return;
  }
  const auto call = std::make_shared<RegionCall>();
  call->scope = frame.scope();
  for (const uint32_t index : changing_weights) {
    const at::NoGradGuard no_grad;
    call->weights_before.emplace_back(
        index, (*call->scope.weights)[index].clone());
  }
  std::vector<at::Tensor> tensors;
  for (IValue& value : values) {
    if (value.isTensor()) {
      tensors.push_back(value.toTensor());
      value = at::Tensor();
    }
  }
  call->inputs = std::move(values);
  const auto results_of =
      [call, code = &first](const std::vector<at::Tensor>& inputs) {
        return run_region(*code, *call, inputs);
      };
  const std::vector<int64_t> before = versions_of(tensors);
  const std::vector<at::Tensor> given =
      tessera::recompute(results_of, tensors, options);
  if (versions_of(tensors) != before) {
    raise(
        {.call = "forward"},
        fmt::format(
            "module \"{}\" cannot be recomputed: it changes a value in place that was made before it. Choose the modules inside it, or the module around it.",
            path));
  }
  size_t next = 0;
  std::vector<IValue> outputs = std::move(call->outputs);
  for (IValue& output : outputs) {
    if (output.isTensor()) {
      output = given[next++];
    }
  }
  frame.set_all(results, std::move(outputs));
}

} // namespace tessera::exported
