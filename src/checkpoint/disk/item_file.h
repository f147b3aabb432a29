// A data file of a DCP folder: torch files one after another.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/files.h"
#include "checkpoint/format/bytes.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/pickle_value.h"

namespace tessera::checkpoint {

/// Bytes `offset` to `offset + length` of the file.
struct ItemPlace {
  uint64_t offset = 0;
  uint64_t length = 0;
};

/// Writes items in order. A tensor's bytes are neither copied nor kept: the
/// memory given to append() must stay valid until the next call of flush() or
/// finish().
class ItemFile {
 public:
  explicit ItemFile(fs::path path);
  ~ItemFile();
  ItemFile(const ItemFile&) = delete;
  ItemFile& operator=(const ItemFile&) = delete;

  ItemPlace add_value(const format::Value& value);

  /// Begins a tensor (a row-major box); append() must then give its bytes, all
  /// of them, in order.
  void begin_tensor(format::DType dtype, const std::vector<int64_t>& sizes);
  void append(format::ByteSpan bytes);
  ItemPlace end_tensor();

  /// Writes all bytes that were given so far.
  void flush();
  /// Writes everything, syncs, closes.
  FileSums finish();

 private:
  void put(format::ByteSpan bytes);
  void put_owned(std::string bytes);
  void write_block();

  fs::path path_;
  UniqueFd file_;
  uint64_t written_ = 0; // bytes in the file
  uint64_t pending_bytes_ = 0; // in parts_
  uint64_t unsynced_from_ = 0;
  std::vector<iovec> parts_;
  std::deque<std::string> owned_; // what some of parts_ point to
  FileSummer sums_;
  // The tensor that is being written.
  uint64_t item_begin_ = 0;
  uint64_t missing_bytes_ = 0;
  std::string tail_;
};

} // namespace tessera::checkpoint
