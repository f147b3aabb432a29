#pragma once

#include <string>

#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {

enum class ShowBoxes { No, Yes };

/// A tree of all names with shapes, dtypes, sizes and files, and totals.
std::string inspect_text(const Source& source, ShowBoxes boxes);
/// The same as JSON, with every box.
std::string inspect_json(const Source& source);

} // namespace tessera::checkpoint
