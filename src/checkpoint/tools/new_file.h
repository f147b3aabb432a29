// Files that are written from their beginning to their end.
#pragma once

#include <cstdint>
#include <filesystem>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/disk/partial_folder.h"
#include "checkpoint/format/bytes.h"

namespace tessera::checkpoint {

/// A new file that is summed as it is written.
class StreamFile {
 public:
  explicit StreamFile(fs::path path);

  void append(format::ByteSpan bytes);
  /// Syncs and closes.
  FileSums finish();
  const UniqueFd& descriptor() const {
    return file_;
  }

 private:
  fs::path path_;
  UniqueFd file_;
  uint64_t written_ = 0;
  FileSummer sums_;
};

/// A file that appears complete or not at all. See [Note: whole or not at all].
class NewFile {
 public:
  /// Throws FileError if the file exists and `overwrite` is false, if it is a
  /// folder, or if another process is writing it.
  NewFile(const fs::path& path, bool overwrite);

  void append(format::ByteSpan bytes) {
    stream_.append(bytes);
  }
  /// Syncs the file, gives it its name, and syncs its folder.
  void commit();

 private:
  fs::path path_;
  PartialFolder partial_;
  StreamFile stream_;
};

} // namespace tessera::checkpoint
