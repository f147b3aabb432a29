// The parameters of a module as an optimizer gets them.
#pragma once

#include <tessera/engine/parameters.h>

#include <string>

namespace tessera::engine {

/// tessera::named_parameters() for those who only look: what is not sharded is
/// not compared between the ranks from then on.
NamedTensors list_parameters(
    torch::nn::Module& module,
    const std::string& prefix = "",
    bool recurse = true);

} // namespace tessera::engine
