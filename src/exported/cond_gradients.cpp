#include "exported/cond_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace tessera::exported {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Passes the first tensor on; the second gets zeros.
struct WithUnread : torch::autograd::Function<WithUnread> {
  static at::Tensor forward(
      AutogradContext* context,
      const at::Tensor& result,
      const at::Tensor& unread) {
    context->saved_data["sizes"] = unread.sizes().vec();
    context->saved_data["dtype"] = static_cast<int64_t>(unread.scalar_type());
    context->saved_data["device"] = unread.device();
    return result.view_as(result);
  }
  static variable_list backward(
      AutogradContext* context,
      variable_list gradients) {
    auto& saved = context->saved_data;
    const auto dtype = static_cast<at::ScalarType>(saved["dtype"].toInt());
    return {
        gradients.front(),
        at::zeros(
            saved["sizes"].toIntVector(),
            at::TensorOptions(dtype).device(saved["device"].toDevice()))};
  }
};

} // namespace

void connect_unread_inputs(
    const std::vector<at::Tensor>& inputs,
    std::vector<c10::IValue>& results) {
  if (!at::GradMode::is_enabled()) {
    return;
  }
  for (c10::IValue& result : results) {
    if (!result.isTensor() || !result.toTensor().is_floating_point()) {
      continue;
    }
    for (const at::Tensor& input : inputs) {
      if (input.defined() && input.requires_grad()) {
        result = WithUnread::apply(result.toTensor(), input);
      }
    }
    return;
  }
}

} // namespace tessera::exported
