#pragma once

#include <tessera/api.h>

#include <string>

namespace tessera {

/// A module some of whose buffers are not part of state dicts, as Python's
/// register_buffer(..., persistent=False) says: tables that are computed, for
/// example. Derive a module from this class as well as from torch::nn::Module
/// to leave buffers out of what tessera saves; they stay buffers otherwise.
class TESSERA_API HasTransientBuffers {
 public:
  virtual ~HasTransientBuffers() = default;

  /// Whether state dicts have this buffer of the module itself.
  virtual bool is_persistent(const std::string& buffer) const = 0;
};

} // namespace tessera
