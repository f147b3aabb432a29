// What happens in and after a backward, for those who only look on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "libtorch/autograd_compat.h"

namespace tessera::engine {

/// Calls `hook` after the engine has added a gradient to a leaf, as long as
/// this object lives, on the engine's thread. The leaf must require gradients.
/// Not for torch::autograd::grad(), which adds nothing to leaves.
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

/// A number for the backward that this thread is in; negative outside of any.
int current_backward();

/// Inside a backward: calls `done` when it has ended, on the thread that called
/// it, or `dropped` if it ended by an exception. `dropped` must not throw.
void at_end_of_backward(
    std::function<void()> done,
    std::function<void()> dropped);

} // namespace tessera::engine
