// Entries of a ZIP archive, stored ones only; see docs/formats/torch_file.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/random_bytes.h"

namespace tessera::format {

struct ZipEntry {
  std::string name;
  uint64_t offset = 0; // of its data in the archive
  uint64_t size = 0;
  uint32_t checksum = 0; // CRC-32 of its data, as the directory has it
};

/// The entries of an archive, in the order of its directory; their data is not
/// read. Throws FormatError for entries that are compressed, encrypted,
/// overlapping, repeated or outside the archive, and for names that leave their
/// folder.
std::vector<ZipEntry> read_zip(const RandomBytes& bytes);

} // namespace tessera::format
