// Entries of a ZIP archive, stored ones only; see docs/formats/torch_file.md.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/format/bytes.h"

namespace tessera::format {

/// One entry; name and data are views of the archive's bytes.
struct ZipEntry {
  std::string_view name;
  uint64_t offset; // of the data in the archive
  ByteSpan data;
};

/// The entries of an archive, in the order of its directory. Nothing is copied:
/// `bytes` (a mapped file, say) must outlive it. Throws FormatError for what is
/// compressed, encrypted, overlapping, twice there or outside of the archive,
/// and for names that leave a folder.
std::vector<ZipEntry> read_zip(ByteSpan bytes);

} // namespace tessera::format
