// What the tests of ZeroRedundancyOptimizer share.
#pragma once

#include <tessera/optim/adamw.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

namespace tessera::testing {

inline void expect_equal(
    const torch::nn::Sequential& a,
    const torch::nn::Sequential& b) {
  const auto left = a->parameters();
  const auto right = b->parameters();
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(torch::equal(left[i], right[i])) << "parameter " << i;
  }
}

/// Layers of 1 M elements each and AdamW over all ranks, after one step: 8 MB
/// of optimizer state per layer.
struct SteppedZero {
  explicit SteppedZero(int layers)
      : model(make_layers(layers)),
        zero(model->parameters(), optimizer_class<optim::AdamW>(1e-2)) {
    for (const at::Tensor& param : model->parameters()) {
      param.mutable_grad() = torch::ones_like(param);
    }
    zero.step();
  }

  torch::nn::Sequential model;
  ZeroRedundancyOptimizer zero;

 private:
  static torch::nn::Sequential make_layers(int count) {
    torch::nn::Sequential layers;
    for (int i = 0; i < count; ++i) {
      layers->push_back(
          torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false)));
    }
    return layers;
  }
};

} // namespace tessera::testing
