// Hooks in and after a backward, for code that only observes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "libtorch/autograd_compat.h"

namespace tessera::engine {

/// Calls `hook` on the engine's thread after the engine has added a gradient to
/// a leaf, as long as this object lives. The leaf must require gradients.
/// torch::autograd::grad() adds nothing to leaves and calls no hook.
class GradientHook {
 public:
  GradientHook(const at::Tensor& leaf, std::function<void()> hook);
  ~GradientHook();
  GradientHook(GradientHook&& other) noexcept;
  GradientHook& operator=(GradientHook&&) = delete;

 private:
  NodePtr accumulator_; // the leaf itself holds it weakly
  uintptr_t key_;
};

/// The number of the backward that this thread is in; negative outside a
/// backward.
int current_backward();

/// Inside a backward: calls `done` when the backward has ended, on the thread
/// that called backward(), or `dropped` if it ended with an exception.
/// `dropped` must not throw.
void at_end_of_backward(
    std::function<void()> done,
    std::function<void()> dropped);

} // namespace tessera::engine
