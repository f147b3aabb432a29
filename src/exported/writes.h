// Which tensors a code reads, and which it changes in place.
#pragma once

#include <cstdint>
#include <set>

#include "exported/code.h"

namespace tessera::exported {

/// Tensors from outside a code that its steps write to, themselves or through a
/// view.
struct Writes {
  std::set<uint32_t> weights;
  /// Weights that a step writes to if an operator returned a view of them
  /// without saying so, as type_as() does.
  std::set<uint32_t> perhaps;
  std::set<size_t> inputs; // positions
};

Writes writes_of(const Code& code);

/// Weights whose values decide something other than their own new values. (A
/// batch norm in training only updates its statistics.) Those that may be read
/// through a view are among them.
std::set<uint32_t> weights_read(const Code& code);

/// Weights that steps of the code name, those of nested graphs too.
std::set<uint32_t> weights_named(const Code& code);

} // namespace tessera::exported
