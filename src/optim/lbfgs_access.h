// Dictionaries of torch::optim::LBFGS.
#pragma once

#include <memory>
#include <string_view>

#include "optim/libtorch_access.h"

namespace tessera::optim {

/// The access to an LBFGS with these groups. Throws if a parameter is a shard.
std::unique_ptr<LibTorchAccess> lbfgs_access_to(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call);

} // namespace tessera::optim
