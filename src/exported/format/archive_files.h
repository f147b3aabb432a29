#pragma once

#include <map>
#include <string>
#include <string_view>

#include "checkpoint/format/random_bytes.h"
#include "checkpoint/format/zip_reader.h"

namespace tessera::exported {

/// The entries of a .pt2 archive, by their names in the folder that all of them
/// lie in. `bytes` must outlive it.
class ArchiveFiles {
 public:
  /// Throws FormatError unless the bytes are a ZIP archive of one folder.
  explicit ArchiveFiles(const format::RandomBytes& bytes);

  /// Null if there is no such entry.
  const format::ZipEntry* find(const std::string& name) const;
  bool has(const std::string& name) const {
    return find(name);
  }
  /// Throws FormatError if there is no such entry, or if it is longer.
  std::string text(const std::string& name, uint64_t max_bytes) const;
  /// In the order of their names.
  const std::map<std::string, format::ZipEntry>& all() const {
    return entries_;
  }

 private:
  const format::RandomBytes& bytes_;
  std::map<std::string, format::ZipEntry> entries_;
};

} // namespace tessera::exported
