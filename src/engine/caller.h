// Finds out who called an operator.
#pragma once

#include <string_view>

namespace tessera::engine {

/// Whether an exported function whose mangled name has `part` in it is among
/// the innermost callers. Takes microseconds, so use it for rare cases only.
bool is_called_by(std::string_view part);

} // namespace tessera::engine
