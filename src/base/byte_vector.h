#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// A byte string, as ranks exchange it. Private: a word as common as this one
/// would stand in the way of a program that says `using namespace tessera`.
using Bytes = std::vector<uint8_t>;

} // namespace tessera
