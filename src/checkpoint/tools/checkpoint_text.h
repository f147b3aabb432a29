// How checkpoints are described to people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/text.h"
#include "checkpoint/format/dcp_metadata.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::checkpoint {

/// "[2, 3]".
std::string sizes_text(const std::vector<int64_t>& sizes);
/// The value as Python would write it, cut if it is long.
std::string value_text(const format::Value& value);
/// The part of a name; a position in a list is its number.
std::string key_text(const format::DcpPath::Key& key);

/// "5GB", "200 MB", "1048576": bytes. Throws FileError.
uint64_t parse_bytes(const std::string& text);

} // namespace tessera::checkpoint
