// Suggests what a user may have meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::state {

/// The one of `names` that needs the fewest edits to become `name`; empty if
/// most of the name would have to change.
std::string nearest(
    std::string_view name,
    const std::vector<std::string>& names);

/// ` Did you mean "fc.weight"?`, or nothing.
std::string did_you_mean(
    std::string_view name,
    const std::vector<std::string>& names);

} // namespace tessera::state
