#include "libtorch/backward_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace tessera::engine {
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

void at_end_of_backward(
    std::function<void()> done,
    std::function<void()> dropped) {
  auto token = std::make_shared<Token>(std::move(dropped));
  torch::autograd::Engine::get_default_engine().queue_callback(
      [token = std::move(token), done = std::move(done)] {
        token->is_done = true;
        done();
      });
}

} // namespace tessera::engine
