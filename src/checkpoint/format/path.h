#pragma once

#include <string_view>

namespace tessera::format {

/// Empty if `path` stays below the folder it is relative to, otherwise what is
/// wrong with it: "is absolute". Does not consider symbolic links.
std::string_view why_it_leaves(std::string_view path);

} // namespace tessera::format
