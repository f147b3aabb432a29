#include "libtorch/backward_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace tessera::libtorch {
namespace {

class PostHook : public torch::autograd::FunctionPostHook {
 public:
  explicit PostHook(std::function<void()> hook) : hook_(std::move(hook)) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& outputs,
      const torch::autograd::variable_list& /*inputs*/) override {
    hook_();
    return outputs;
  }

 private:
  std::function<void()> hook_;
};

/// The engine drops its callbacks when backward throws.
struct Token {
  explicit Token(std::function<void()> function)
      : dropped(std::move(function)) {}
  ~Token() {
    if (!is_done) {
      dropped();
    }
  }
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;

  std::function<void()> dropped;
  bool is_done = false;
};

} // namespace

GradientHook::GradientHook(const at::Tensor& leaf, std::function<void()> hook)
    : accumulator_(torch::autograd::impl::grad_accumulator(leaf)),
      key_(accumulator_->add_post_hook(
          std::make_unique<PostHook>(std::move(hook)))) {}

GradientHook::~GradientHook() {
  if (accumulator_) {
    accumulator_->del_post_hook(key_);
  }
}

GradientHook::GradientHook(GradientHook&& other) noexcept
    : accumulator_(std::move(other.accumulator_)), key_(other.key_) {
  other.accumulator_.reset();
}

int current_backward() {
  return torch::autograd::get_current_graph_task_id();
}

std::weak_ptr<const void> at_end_of_backward(
    std::function<void()> done,
    std::function<void()> dropped) {
  auto token = std::make_shared<Token>(std::move(dropped));
  torch::autograd::Engine::get_default_engine().queue_callback(
      [token, done = std::move(done)] {
        token->is_done = true;
        done();
      });
  return token;
}

void OpenBackwards::enter(const std::shared_ptr<const void>& owner) {
  const int number = current_backward();
  const auto is_this = [number](const auto& open) {
    return open.first == number;
  };
  if (number < 0 || std::ranges::any_of(open_, is_this)) {
    return;
  }
  const auto num_failed = std::erase_if(
      open_, [](const auto& open) { return open.second.expired(); });
  if (num_failed > 0) {
    recover_();
  }
  const auto failed = [this, number, thread = thread_] {
    if (std::this_thread::get_id() == thread) {
      close(number);
      recover_();
    }
  };
  open_.emplace_back(
      number,
      at_end_of_backward(
          [this, number, failed] {
            if (open_.size() == 1) {
              try {
                end_();
              } catch (...) {
                failed();
                throw;
              }
            }
            close(number);
          },
          [owner, failed] { failed(); }));
}

void OpenBackwards::note_outside() {
  thread_ = std::this_thread::get_id();
  if (!open_.empty()) { // whatever the engine still holds, none is under way
    open_.clear();
    recover_();
  }
}

void OpenBackwards::close(int number) {
  std::erase_if(
      open_, [number](const auto& open) { return open.first == number; });
}

} // namespace tessera::libtorch
