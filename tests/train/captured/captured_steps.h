// What the tests of captured steps share. On the CPU a tape records (tape.h),
// on a GPU a CUDA graph: TESSERA_TEST_DEVICE=cuda:0 runs the same tests there.
#pragma once

#include <tessera/train/captured_step.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/clip_on_device.h"
#include "fsdp/clipped_gradients.h"
#include "support/device.h"
#include "support/warnings.h"
#include "train/captured/tape.h"
#include "train/front_ends.h"

namespace tessera::testing {

using Inputs = std::vector<at::Tensor>;

/// The CPU has a tape, a GPU its graphs.
inline std::unique_ptr<Tapes> recorder() {
  return test_device().is_cpu() ? std::make_unique<Tapes>() : nullptr;
}

/// Tests of one rank, on any device.
struct OnARecorder : ::testing::Test {
  const std::unique_ptr<Tapes> tapes = recorder();
};

/// Ranks that make a step together. On the CPU each replay of the tape makes
/// their collectives; ranks that share a GPU exchange on the host and cannot
/// capture. Suites of several ranks are called CapturedRanks.
struct OnSeveralRanks : ::testing::Test {
  void SetUp() override {
    if (!test_device().is_cpu()) {
      GTEST_SKIP() << "ranks that share a device cannot capture";
    }
  }
};

/// A thousand replays on a GPU; the tape is slow.
inline int many_steps() {
  return test_device().is_cpu() ? 100 : 1003;
}

/// On the CPU, tessera::clip_grad_norm_() computes the norm on the host.
inline void clip(torch::nn::Module& model, double max_norm) {
  const at::NoGradGuard no_grad;
  fsdp::clip_on_device(fsdp::gradients_of(model), max_norm, 2.0);
}

/// One step of any model with an optimizer.
template <class T>
CapturedStep::Function step_of(T& trained) {
  return [&trained](const Inputs& inputs) {
    const auto loss = loss_of(trained.model, inputs[0]);
    loss.backward();
    clip(*trained.model, 0.5);
    trained.optimizer->step();
    trained.optimizer->zero_grad();
    return loss.detach();
  };
}

/// Steps that are never captured: what a GPU computes with learning rates on
/// the device.
inline CapturedStepOptions always_eager() {
  return CapturedStepOptions().warmup_steps(1 << 30);
}

/// Two models that begin alike and make the same steps: one is captured, the
/// other never is.
template <class Optimizer>
struct Twins {
  explicit Twins(FrontEnd front_end)
      : eager(front_end),
        captured(front_end),
        eager_step(
            eager.model,
            {*eager.optimizer},
            step_of(eager),
            always_eager()),
        step(captured.model, {*captured.optimizer}, step_of(captured)) {}

  Trained<Optimizer> eager;
  Trained<Optimizer> captured;
  CapturedStep eager_step;
  CapturedStep step;
};

/// A model that is not Tessera's business, with what a step may contain.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(double dropout = 0)
      : first(register_module("first", torch::nn::Linear(4, 8))),
        norm(register_module("norm", torch::nn::BatchNorm1d(8))),
        drop(register_module("drop", torch::nn::Dropout(dropout))),
        last(register_module("last", torch::nn::Linear(8, 2))) {}

  at::Tensor forward(const at::Tensor& x) {
    return last(drop(torch::relu(norm(first(x)))));
  }

  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Dropout drop;
  torch::nn::Linear last;
};
TORCH_MODULE(Net);

inline Net make_net(double dropout = 0) {
  torch::manual_seed(11);
  Net net(dropout);
  net->to(test_device());
  return net;
}

inline at::Tensor batch_of(int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  return at::randn({6, 4}, generator).to(test_device());
}

/// A net and its AdamW, stepped by a CapturedStep around `body`, which computes
/// the loss.
struct Netting {
  using Loss = std::function<at::Tensor(Net&, const at::Tensor&)>;

  explicit Netting(
      const CapturedStepOptions& options = {},
      double dropout = 0,
      const Loss& loss =
          [](Net& model, const at::Tensor& x) {
            return model->forward(x).square().mean();
          })
      : net(make_net(dropout)),
        optimizer(net->parameters(), 0.01),
        step(
            net,
            {optimizer},
            [this, loss](const Inputs& inputs) {
              const auto value = loss(net, inputs[0]);
              value.backward();
              optimizer.step();
              optimizer.zero_grad();
              return value.detach();
            },
            options) {}

  std::vector<at::Tensor> snapshot() {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& param : net->parameters()) {
      copies.push_back(param.detach().clone());
    }
    for (const at::Tensor& buffer : net->buffers()) {
      copies.push_back(buffer.clone());
    }
    return copies;
  }

  Net net;
  optim::AdamW optimizer;
  CapturedStep step;
};

/// The reason why a step with this optimizer, or around this function, is not
/// captured.
inline std::string reason_of(
    Net& net,
    torch::optim::Optimizer& optimizer,
    const CapturedStep::Function& function) {
  const Warnings warnings;
  CapturedStep step(net, {optimizer}, function);
  for (int i = 0; i < 5; ++i) {
    step({batch_of(i)});
  }
  EXPECT_LE(warnings.texts.size(), 1);
  return step.eager_reason();
}

/// A step without clipping.
template <class O>
CapturedStep::Function plain_step(Net& net, O& optimizer) {
  return [&](const Inputs& inputs) {
    const auto loss = net->forward(inputs[0]).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  };
}

/// nonzero() in the middle of backward.
struct CountsInBackward : torch::autograd::Function<CountsInBackward> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* /*context*/,
      const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      const torch::autograd::variable_list& gradients) {
    torch::nonzero(gradients[0]);
    return gradients;
  }
};

} // namespace tessera::testing
