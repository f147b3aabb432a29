// Dictionaries of torch::optim::LBFGS.
#pragma once

#include <memory>
#include <string_view>

#include "optim/libtorch_access.h"

namespace tessera::optim {

/// Of an LBFGS with these groups. Throws if it has shards.
std::unique_ptr<LibTorchAccess> lbfgs_access_to(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call);

} // namespace tessera::optim
