// Names of parameters and modules as users know them.
#pragma once

#include <string>
#include <string_view>

namespace tessera::engine {

/// The name under which a wrapper for recomputation registers the module it
/// wraps.
inline constexpr std::string_view kCheckpointSegment =
    "_checkpoint_wrapped_module";

/// Drops the segments that wrappers add, wherever they are: Python's names and
/// ours then agree, and a model is saved under the same names with and without
/// wrappers.
std::string clean_name(std::string_view name);

} // namespace tessera::engine
