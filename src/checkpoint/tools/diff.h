#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/store/source.h"
#include "checkpoint/tools/progress.h"

namespace tessera::checkpoint {

struct DiffOptions {
  /// Without a tolerance every bit counts, and so does the dtype. With one,
  /// elements may differ by atol + rtol * |b|, and dtypes may differ.
  std::optional<double> rtol;
  std::optional<double> atol;
};

struct DiffReport {
  size_t num_same = 0; // tensors and values
  /// One text for each name that differs.
  std::vector<std::string> differences;
};

/// Throws FileError, DamageError.
DiffReport diff(
    const Source& a,
    const Source& b,
    const DiffOptions& options,
    Progress& progress);

} // namespace tessera::checkpoint
