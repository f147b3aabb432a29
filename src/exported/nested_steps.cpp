#include "exported/nested_steps.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include <utility>

#include "exported/autocast_guard.h"
#include "exported/cond_gradients.h"
#include "exported/python_math.h"

namespace tessera::exported {
namespace {

using c10::IValue;
using Values = std::vector<IValue>;

} // namespace

std::vector<Code*> NestedStep::nested() {
  return {&first, &second};
}

void GradModeStep::run(Frame& frame) const {
  Values inputs = frame.take_all(operands);
  const at::AutoGradMode mode(enabled);
  frame.set_all(
      results, exported::run(first, frame.scope(), std::move(inputs)));
}

void AutocastStep::run(Frame& frame) const {
  Values inputs = frame.take_all(operands);
  const AutocastGuard guard(type, enabled, dtype, caches);
  frame.set_all(
      results, exported::run(first, frame.scope(), std::move(inputs)));
}

void PlainGraphStep::run(Frame& frame) const {
  Values inputs = frame.take_all(operands);
  frame.set_all(
      results, exported::run(first, frame.scope(), std::move(inputs)));
}

void CondStep::run(Frame& frame) const {
  Values inputs = frame.take_all(operands);
  const bool chosen = as_bool(inputs.front());
  inputs.erase(inputs.begin());
  const Code& branch = chosen ? first : second;
  std::vector<at::Tensor> ignored;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (branch.inputs[i] == Result::kDropped && inputs[i].isTensor()) {
      ignored.push_back(inputs[i].toTensor());
    }
  }
  Values values = exported::run(branch, frame.scope(), std::move(inputs));
  connect_unread_inputs(ignored, values);
  frame.set_all(results, std::move(values));
}

void WhileStep::run(Frame& frame) const {
  Values values = frame.take_all(operands);
  while (as_bool(exported::run(first, frame.scope(), values).front())) {
    Values next = exported::run(second, frame.scope(), values);
    for (size_t i = 0; i < num_carried; ++i) {
      values[i] = std::move(next[i]);
    }
  }
  values.resize(num_carried);
  frame.set_all(results, std::move(values));
}

void ScanStep::run(Frame& frame) const {
  const Values all = frame.take_all(operands);
  const auto carried_end = all.begin() + static_cast<ptrdiff_t>(num_carried);
  const auto rows_end = carried_end + static_cast<ptrdiff_t>(num_rows);
  Values carried(all.begin(), carried_end);
  std::vector<std::vector<at::Tensor>> rows; // by result, then by row
  const int64_t count = carried_end->toTensor().size(0);
  TORCH_CHECK(count > 0, "it is called with no rows.");
  for (int64_t row = 0; row < count; ++row) {
    Values inputs = carried;
    for (auto each = carried_end; each != rows_end; ++each) {
      inputs.emplace_back(each->toTensor().select(0, row));
    }
    inputs.insert(inputs.end(), rows_end, all.end());
    Values outputs = exported::run(first, frame.scope(), std::move(inputs));
    rows.resize(outputs.size() - num_carried);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (i < num_carried) {
        carried[i] = std::move(outputs[i]);
      } else {
        rows[i - num_carried].push_back(outputs[i].toTensor());
      }
    }
  }
  Values values = std::move(carried);
  for (const auto& each : rows) {
    values.emplace_back(at::stack(each));
  }
  frame.set_all(results, std::move(values));
}

} // namespace tessera::exported
