// The names of the parameters that optimizers have.
#pragma once

#include <string>
#include <vector>

#include "transfer/optim_tensors.h"

namespace tessera::transfer {

/// A parameter of an optimizer.
struct OptimName {
  std::string name;
  bool is_trainable = true; // false: frozen
};
/// The parameters of one optimizer, by group.
using OptimGroupNames = std::vector<std::vector<OptimName>>;
/// The parameters of several optimizers.
using OptimNames = std::vector<OptimGroupNames>;

OptimGroupNames names_of(const OptimTensors& tensors);

} // namespace tessera::transfer
