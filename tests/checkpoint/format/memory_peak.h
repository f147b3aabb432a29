#pragma once

#include <cstddef>
#include <functional>

namespace tessera::format {

/// The most bytes from operator new that were alive at once while `run` ran,
/// beyond those before. Counts this thread and all others.
size_t peak_bytes_of(const std::function<void()>& run);

} // namespace tessera::format
