// The parameters of a module as an optimizer gets them.
#pragma once

#include <tessera/engine/parameters.h>

#include <string>

namespace tessera::engine {

/// tessera::named_parameters() for callers that only read: unlike that
/// function, it does not have plain parameters compared between the ranks.
NamedTensors list_parameters(
    torch::nn::Module& module,
    const std::string& prefix = "",
    bool recurse = true);

} // namespace tessera::engine
