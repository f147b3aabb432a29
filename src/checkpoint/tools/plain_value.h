// Values of content without tensors in them.
#pragma once

#include "checkpoint/format/pickle_value.h"
#include "checkpoint/tools/content.h"

namespace tessera::checkpoint {

/// Throws FileError, with the entry's name, for a value that holds tensors
/// itself (in a tuple, for example): such tensors are not copied.
format::Value plain_value(const Content& content, const ValueEntry& entry);

} // namespace tessera::checkpoint
