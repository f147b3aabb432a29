// What errors of a loader say.
#pragma once

#include <tessera/data/loader_core.h>
#include <tessera/data/sampler.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace tessera::data::detail {

/// Which sample of which source could not be read, where in the epoch, and why.
/// `current` is the sample that was being read; -1 if it is not known.
std::string failure_text(
    const LoaderParts& parts,
    const std::vector<int64_t>& indices,
    int64_t current,
    Position position,
    const std::exception_ptr& error);

} // namespace tessera::data::detail
