// Archives of torch.export.save; see docs/formats/exported-program.md.
#pragma once

#include "checkpoint/format/random_bytes.h"
#include "exported/format/program.h"

namespace tessera::exported {

/// Whether the bytes are a ZIP archive that says it is a .pt2. Throws
/// FormatError if they are no ZIP archive.
bool is_archive(const format::RandomBytes& bytes);

/// Reads the programs and where the tensors lie; the bytes of a tensor are
/// `bytes.bytes(payload.offset, payload.size)`, and all payloads lie within
/// `bytes`. Throws FormatError, and UnsupportedFormat for what would need
/// Python: pickled payloads, objects, compiled code.
///
/// Each parameter, buffer and constant that a program takes is in `weights` or
/// `constants` with the sizes that its graph says. A program other than
/// "model" needs no configs of its own: it shares those of "model".
Archive read_archive(const format::RandomBytes& bytes);

} // namespace tessera::exported
