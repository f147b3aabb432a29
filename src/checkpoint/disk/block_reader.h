// Bytes of a checkpoint's files, compared with their checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "checkpoint/disk/source.h"

namespace tessera::checkpoint {

/// Reads bytes of a source's files and compares every block it touches with the
/// block's checksum, if the source has checksums. Keeps one block, so that
/// neighbours in a file, read in their order, cost one read. For one thread.
class BlockReader {
 public:
  explicit BlockReader(const Source& source, bool verify = true);
  ~BlockReader();

  /// Throws DamageError with the file and the block's range, FileError for
  /// files that cannot be read or end too early.
  void read(size_t file, uint64_t offset, uint8_t* to, uint64_t bytes);
  /// Compares the blocks that hold these bytes, unless this reader did already.
  void check(size_t file, uint64_t begin, uint64_t end);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace tessera::checkpoint
