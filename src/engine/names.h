// Names of parameters and modules as users know them.
#pragma once

#include <string>
#include <string_view>

namespace tessera::engine {

/// The child that a module wrapping another for recomputation registers it as.
inline constexpr std::string_view kCheckpointSegment =
    "_checkpoint_wrapped_module";

/// Drops the segments that wrappers add, wherever they are: Python's names and
/// ours then agree, and a model is saved under the same ones with and without.
std::string clean_name(std::string_view name);

} // namespace tessera::engine
