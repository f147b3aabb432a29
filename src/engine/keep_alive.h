// What a face owns besides its bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace tessera::engine {

class Unit;

/// Keeps a unit alive from the autograd metadata of a face that has no gradient
/// edge to do so: a frozen or summoned one. Registering a hook clears this, but
/// is refused for the one, and the guard keeps the unit of the other.
struct KeepAlive : torch::autograd::FunctionPreHook {
  explicit KeepAlive(std::shared_ptr<Unit> owned) : unit(std::move(owned)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& gradients) override {
    return gradients;
  }
  std::shared_ptr<Unit> unit;
};

inline torch::autograd::AutogradMeta& meta_of(const at::Tensor& tensor) {
  return *torch::autograd::impl::materialize_autograd_meta(tensor);
}

} // namespace tessera::engine
