// What the tests of ZeroRedundancyOptimizer have in common.
#pragma once

#include <torch/torch.h>

#include <utility>
#include <vector>

#include "support/device.h"

namespace tessera::parity {

/// Linear layers one after another, on `device`.
inline torch::nn::Sequential linears(
    const std::vector<std::pair<int, int>>& shapes,
    at::Device device = testing::test_device()) {
  torch::nn::Sequential model;
  for (const auto& [in, out] : shapes) {
    model->push_back(torch::nn::Linear(in, out));
  }
  model->to(device);
  return model;
}

/// Parameters and buffers of a module go to another of the same structure.
inline void copy_values(const torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  const auto copy = [](const std::vector<at::Tensor>& source,
                       const std::vector<at::Tensor>& target) {
    for (size_t i = 0; i < source.size(); ++i) {
      target[i].copy_(source[i]);
    }
  };
  copy(from.parameters(), to.parameters());
  copy(from.buffers(), to.buffers());
}

} // namespace tessera::parity
