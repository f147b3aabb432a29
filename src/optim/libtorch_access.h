// Dictionaries of LibTorch's own optimizers.
#pragma once

#include <tessera/optim/options.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "optim/dictionary.h"

namespace tessera::optim {

class LibTorchAccess : public Access {
 public:
  /// The state that a step with a zero gradient leaves; null if it leaves none.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> initial_state(
      const at::Tensor& param,
      const torch::optim::OptimizerOptions& options) const = 0;
};

/// Throws for keys that are not in `fields`: LibTorch's options have no room
/// for them.
void refuse_unknown_keys(
    const std::vector<OptionField>& fields,
    const StateDict& group,
    const ErrorSite& site,
    const std::string& where);
[[noreturn]] void refuse_unknown_state(
    const StateKey& key,
    const ErrorSite& site);

/// Throws c10::TypeError if the optimizer is not one of LibTorch's, and for an
/// LBFGS on shards.
std::unique_ptr<LibTorchAccess> libtorch_access_to(
    const torch::optim::Optimizer& optimizer,
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call);

} // namespace tessera::optim
