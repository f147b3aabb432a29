// How parameters and units are called.
#pragma once

#include <string>
#include <string_view>

namespace tessera::shard {

/// The name without the segments that wrappers add, which Python's state dicts
/// leave out too.
std::string clean_name(std::string_view name);

} // namespace tessera::shard
