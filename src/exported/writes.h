// Which tensors a code changes in place.
#pragma once

#include <cstdint>
#include <set>

#include "exported/code.h"

namespace tessera::exported {

/// Tensors from outside a code that its steps write to, themselves or through a
/// view.
struct Writes {
  std::set<uint32_t> weights;
  std::set<size_t> inputs; // positions
};

Writes writes_of(const Code& code);

} // namespace tessera::exported
