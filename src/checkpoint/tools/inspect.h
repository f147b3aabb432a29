#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {

struct InspectOptions {
  bool boxes = false; // show every stored box
  /// Names of at most so many parts are shown, and what is below them is added
  /// up. 0: totals only. Nothing: all names.
  std::optional<size_t> depth = std::nullopt;
};

/// A tree of names with shapes, dtypes, sizes and files, and totals.
std::string inspect_text(const Source& source, const InspectOptions& options);
/// The same as JSON, with every box.
std::string inspect_json(const Source& source);

} // namespace tessera::checkpoint
