#include "exported/format/archive_files.h"

#include <utility>

#include "checkpoint/format/format_error.h"

namespace tessera::exported {

using format::FormatError;
using format::in_quotes;

ArchiveFiles::ArchiveFiles(const format::RandomBytes& bytes) : bytes_(bytes) {
  std::string folder;
  for (auto& entry : format::read_zip(bytes)) {
    if (folder.empty()) {
      folder = entry.name.substr(0, entry.name.find('/') + 1);
    }
    if (folder.empty() || !entry.name.starts_with(folder)) {
      throw FormatError(
          entry.offset,
          "entry " + in_quotes(entry.name) +
              " is not in the folder of the others");
    }
    std::string name = entry.name.substr(folder.size());
    entries_.emplace(std::move(name), std::move(entry));
  }
}

const format::ZipEntry* ArchiveFiles::find(const std::string& name) const {
  const auto entry = entries_.find(name);
  return entry == entries_.end() ? nullptr : &entry->second;
}

std::string ArchiveFiles::text(const std::string& name, uint64_t max_bytes)
    const {
  const auto* entry = find(name);
  if (!entry) {
    throw FormatError("the archive has no " + name);
  }
  if (entry->size > max_bytes) {
    throw FormatError(
        entry->offset,
        name + " has " + std::to_string(entry->size) + " bytes, at most " +
            std::to_string(max_bytes) + " are read");
  }
  return bytes_.text(entry->offset, entry->size);
}

} // namespace tessera::exported
