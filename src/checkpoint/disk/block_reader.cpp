#include "checkpoint/disk/block_reader.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/disk/checksums.h"
#include "checkpoint/disk/input.h"
#include "checkpoint/format/bytes.h"

namespace tessera::checkpoint {
namespace {

// Without checksums, reads smaller than this go through the buffer, which turns
// many small neighbouring reads into one.
constexpr uint64_t kSmallBytes = uint64_t{64} << 10;
constexpr size_t kMostOpenFiles = 64;

} // namespace

struct BlockReader::State {
  struct File {
    const FileSums* sums = nullptr; // null: none
    std::vector<bool> compared; // by block
    UniqueFd descriptor;
  };

  State(const Source& from, bool verify)
      : source(from), files(from.files().size()) {
    const auto* checksums = verify ? from.checksums() : nullptr;
    for (size_t i = 0; checksums && i < files.size(); ++i) {
      const auto found = checksums->files.find(from.files()[i].name);
      if (found != checksums->files.end()) {
        files[i].sums = &found->second;
        files[i].compared.resize(found->second.blocks.size());
      }
    }
  }

  const UniqueFd& open(size_t file) {
    if (!files[file].descriptor) {
      if (num_open == kMostOpenFiles) {
        for (auto& other : files) {
          other.descriptor.reset();
        }
        num_open = 0;
      }
      files[file].descriptor = source.open_file(file);
      ++num_open;
    }
    return files[file].descriptor;
  }

  void read_direct(size_t file, uint64_t offset, uint8_t* to, uint64_t bytes) {
    read_at(open(file), source.files()[file].path, offset, to, bytes);
  }

  // Reads these bytes into the buffer.
  void keep(size_t file, uint64_t begin, uint64_t bytes) {
    if (!buffer) {
      buffer.reset(new uint8_t[kBlockBytes]);
    }
    kept_bytes = 0;
    read_direct(file, begin, buffer.get(), bytes);
    kept_file = file;
    kept_begin = begin;
    kept_bytes = bytes;
  }

  bool has_kept(size_t file, uint64_t offset) const {
    return kept_file == file && offset >= kept_begin &&
        offset - kept_begin < kept_bytes;
  }

  // Copies what the buffer holds from `offset` on; returns how many bytes.
  uint64_t copy_kept(uint64_t offset, uint8_t* to, uint64_t bytes) const {
    const uint64_t from = offset - kept_begin;
    const uint64_t count = std::min(bytes, kept_bytes - from);
    std::memcpy(to, buffer.get() + from, count);
    return count;
  }

  void compare(size_t file, uint64_t block, format::ByteSpan bytes) {
    const uint64_t expected = files[file].sums->blocks[block];
    if (checksum(bytes) != expected) {
      const uint64_t begin = block * kBlockBytes;
      throw DamageError(
          quoted(source.files()[file].path) + ": bytes " +
          std::to_string(begin) + " to " +
          std::to_string(begin + bytes.size()) +
          " are not those that were written. Use another checkpoint; `tessera ckpt verify` lists all damage.");
    }
    files[file].compared[block] = true;
  }

  uint64_t block_bytes(size_t file, uint64_t block) const {
    return std::min(
        kBlockBytes, source.files()[file].bytes - block * kBlockBytes);
  }

  void keep_block(size_t file, uint64_t block) {
    if (!has_kept(file, block * kBlockBytes)) {
      keep(file, block * kBlockBytes, block_bytes(file, block));
      try {
        compare(file, block, {buffer.get(), kept_bytes});
      } catch (...) {
        kept_bytes = 0;
        throw;
      }
    }
  }

  // Reads up to the end of a block; a block that is wanted as a whole is read
  // directly into its destination. Returns how many bytes were read.
  uint64_t read_in_block(
      size_t file,
      uint64_t offset,
      uint8_t* to,
      uint64_t bytes) {
    const uint64_t block = offset / kBlockBytes;
    const uint64_t whole = block_bytes(file, block);
    if (offset == block * kBlockBytes && bytes >= whole) {
      read_direct(file, offset, to, whole);
      compare(file, block, {to, whole});
      return whole;
    }
    keep_block(file, block);
    return copy_kept(offset, to, bytes);
  }

  uint64_t read_unsummed(
      size_t file,
      uint64_t offset,
      uint8_t* to,
      uint64_t bytes) {
    if (has_kept(file, offset)) {
      return copy_kept(offset, to, bytes);
    }
    if (bytes >= kSmallBytes) {
      read_direct(file, offset, to, bytes);
      return bytes;
    }
    keep(
        file,
        offset,
        std::min(kSmallBytes, source.files()[file].bytes - offset));
    return copy_kept(offset, to, bytes);
  }

  const Source& source;
  std::vector<File> files;
  size_t num_open = 0;
  std::unique_ptr<uint8_t[]> buffer; // kBlockBytes
  size_t kept_file = 0;
  uint64_t kept_begin = 0;
  uint64_t kept_bytes = 0;
};

BlockReader::BlockReader(const Source& source, bool verify)
    : state_(std::make_unique<State>(source, verify)) {}

BlockReader::~BlockReader() = default;

void BlockReader::read(
    size_t file,
    uint64_t offset,
    uint8_t* to,
    uint64_t bytes) {
  const auto& entry = state_->source.files().at(file);
  if (!format::fits(offset, bytes, entry.bytes)) {
    throw FileError(
        quoted(entry.path) + ": " + std::to_string(bytes) +
        " bytes are promised at byte " + std::to_string(offset) +
        ", the file ends at " + std::to_string(entry.bytes) +
        ". The file was cut off; use another checkpoint.");
  }
  const bool has_sums = state_->files[file].sums;
  while (bytes > 0) {
    const uint64_t count = has_sums
        ? state_->read_in_block(file, offset, to, bytes)
        : state_->read_unsummed(file, offset, to, bytes);
    offset += count;
    to += count;
    bytes -= count;
  }
}

void BlockReader::check(size_t file, uint64_t begin, uint64_t end) {
  const auto& entry = state_->files.at(file);
  if (!entry.sums || begin >= end) {
    return;
  }
  for (uint64_t block = begin / kBlockBytes; block * kBlockBytes < end;
       ++block) {
    if (!entry.compared.at(block)) {
      state_->keep_block(file, block);
    }
  }
}

} // namespace tessera::checkpoint
