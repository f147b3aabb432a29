// What the tests of captured steps share. On the CPU a tape records (tape.h),
// on a GPU a CUDA graph: TESSERA_TEST_DEVICE=cuda:0 runs the same tests there.
#pragma once

#include <tessera/train/captured_step.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <memory>
#include <vector>

#include "fsdp/clip_on_device.h"
#include "fsdp/clipped_gradients.h"
#include "support/device.h"
#include "train/front_ends.h"
#include "train/tape.h"

namespace tessera::testing {

using Inputs = std::vector<at::Tensor>;

/// The CPU has a tape, a GPU its graphs.
inline std::unique_ptr<Tapes> recorder() {
  return test_device().is_cpu() ? std::make_unique<Tapes>() : nullptr;
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

} // namespace tessera::testing
