// Parameters and gradients for tests of optimizers.
#pragma once

#include <torch/torch.h>

#include <vector>

namespace tessera::optim {

/// Two of double, one of float, one without elements.
inline std::vector<at::Tensor> make_params() {
  torch::manual_seed(5);
  return {
      torch::randn({4, 3}, torch::dtype(at::kDouble).requires_grad(true)),
      torch::randn({7}, torch::dtype(at::kDouble).requires_grad(true)),
      torch::randn({2}, torch::dtype(at::kFloat).requires_grad(true)),
      torch::empty({0}, torch::dtype(at::kFloat).requires_grad(true))};
}

/// The same for the same step.
inline void make_gradients(std::vector<at::Tensor>& params, int step) {
  torch::manual_seed(100 + step);
  for (at::Tensor& param : params) {
    param.mutable_grad() = torch::randn_like(param);
  }
}

} // namespace tessera::optim
