// The meaning of REDUCE, NEWOBJ and BUILD: the value that stands for a call.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "checkpoint/format/pickle_globals.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::format {

/// A call that a pickle asks for. The call is never made.
struct Call {
  GlobalRef callee;
  uint64_t at; // place in the pickle, for messages
  std::vector<Value> args;
  std::optional<Value> state; // what BUILD gave the result
};

/// The value that the call would have returned. Throws FormatError for
/// arguments that torch does not write.
Value result_of(Call call);

/// "TORCH_CHANNELS_LAST".
MemoryFormat memory_format_named(std::string_view name, uint64_t at);

} // namespace tessera::format
