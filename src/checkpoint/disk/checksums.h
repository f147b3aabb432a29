// Checksums of a checkpoint's files; see docs/formats/checksums.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/bytes.h"

namespace tessera::checkpoint {

/// Files are summed in blocks of this size from their beginning; the last block
/// may be shorter.
constexpr uint64_t kBlockBytes = uint64_t{1} << 20;

constexpr std::string_view kChecksumsName = ".checksums";

struct FileSums {
  uint64_t bytes = 0;
  std::vector<uint64_t> blocks;

  bool operator==(const FileSums&) const = default;
};

struct Checksums {
  std::map<std::string, FileSums> files; // by name in the folder

  bool operator==(const Checksums&) const = default;
};

/// XXH3, 64 bits.
uint64_t checksum(format::ByteSpan bytes);

/// The sums of a file whose bytes come piece by piece.
class FileSummer {
 public:
  FileSummer();
  ~FileSummer();
  FileSummer(FileSummer&&) noexcept;
  FileSummer& operator=(FileSummer&&) noexcept;

  void add(format::ByteSpan bytes);
  /// The sums of all bytes that were added.
  FileSums finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
  FileSums sums_;
};

FileSums sums_of(format::ByteSpan bytes);

/// The text of the side file.
std::string write_checksums(const Checksums& sums);
/// Throws format::FormatError for anything but the text that write_checksums()
/// gives, even if a single bit was changed.
Checksums read_checksums(std::string_view text);

} // namespace tessera::checkpoint
