#pragma once

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::format {

/// The value that a pickle describes. Nothing is called and nothing is
/// imported: docs/formats/dcp.md lists the opcodes and globals that have a
/// meaning here. Memory stays within a small multiple of `bytes`. Throws
/// FormatError, with the place of the opcode, for anything else, also for bytes
/// after the end.
Value read_pickle(ByteSpan bytes);

} // namespace tessera::format
