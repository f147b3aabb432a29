// The entries of a module's state dict.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::transfer {

/// A parameter or buffer that a state dict has an entry for.
struct StateEntry {
  std::string name;
  at::Tensor tensor;
  bool is_buffer = false;
};

/// All entries of a module, in the order and under the names that Python's
/// state_dict() gives them: tied parameters appear under every name.
std::vector<StateEntry> state_entries(const torch::nn::Module& module);

} // namespace tessera::transfer
