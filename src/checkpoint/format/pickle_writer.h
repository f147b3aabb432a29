#pragma once

#include <string>

#include "checkpoint/format/pickle_value.h"

namespace tessera::format {

/// The pickle of a value, protocol 2: for Python's pickle.load, and without
/// Objects and Paths for torch.load(weights_only=True) too. Storages become
/// persistent ids as in torch files. Throws FormatError for a string that is
/// not UTF-8 and for values nested deeper than read_pickle() allows.
std::string write_pickle(const Value& value);

} // namespace tessera::format
