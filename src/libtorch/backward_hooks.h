// What happens in a backward and at its end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "libtorch/autograd_compat.h"

namespace tessera::libtorch {

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

inline bool in_backward() {
  return current_backward() >= 0;
}

/// Inside a backward: calls `done` when the backward has ended, on the thread
/// that called it, or `dropped` if the backward ended by an exception;
/// `dropped` must not throw. Neither follows the other: where `done` throws,
/// `dropped` is not called.
///
/// The engine drops what it holds of a failed backward, and `dropped` is called
/// then: on a GPU on a thread of the engine's own, maybe after the program has
/// caught the error and gone on. What is returned expires just before.
std::weak_ptr<const void> at_end_of_backward(
    std::function<void()> done,
    std::function<void()> dropped);

/// The backwards of a model that are under way, for an owner who must do
/// something when the last one ends, and recover when one fails.
///
/// `recover` is called on the program's thread: when the engine drops the
/// failed backward there, or, where the engine drops it on another thread, by
/// the next enter() or note_outside().
///
/// Thread safety: one thread at a time; a failed backward that the engine drops
/// on another thread touches nothing here.
class OpenBackwards {
 public:
  /// `end` may throw, which fails the backward.
  OpenBackwards(std::function<void()> end, std::function<void()> recover)
      : end_(std::move(end)), recover_(std::move(recover)) {}

  /// This thread is in a backward, maybe one that is known already. `owner`
  /// holds this object, and is kept until the engine lets go of the backward.
  void enter(const std::shared_ptr<const void>& owner);
  /// This thread runs the program, outside of any backward.
  void note_outside();
  bool empty() const {
    return open_.empty();
  }

 private:
  void close(int number);

  const std::function<void()> end_;
  const std::function<void()> recover_;
  std::thread::id thread_; // of the last note_outside()
  /// By number, with what expires when the engine lets go.
  std::vector<std::pair<int, std::weak_ptr<const void>>> open_;
};

} // namespace tessera::libtorch
