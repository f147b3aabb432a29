// Dictionaries of torch::optim::LBFGS.
#pragma once

#include <memory>
#include <string_view>

#include "optim/libtorch_access.h"

namespace tessera::optim {

/// `optimizer` is an LBFGS. Throws if it has shards.
std::unique_ptr<LibTorchAccess> lbfgs_access_to(
    const torch::optim::Optimizer& optimizer,
    std::string_view call);

} // namespace tessera::optim
