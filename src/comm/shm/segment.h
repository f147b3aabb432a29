// A piece of memory that processes on one host map together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera::comm::shm {

/// Where a peer finds a segment: a descriptor in its creator's table.
struct SegmentLocator {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t bytes = 0;
  uint64_t inode = 0;

  std::string to_string() const;
  /// Throws std::invalid_argument when `text` is not what to_string() writes.
  static SegmentLocator parse(const std::string& text);
};

/// Owns one mapping. Zero-filled when created.
///
/// The memory is a memfd: it never has a name in any file system, so that a
/// process killed at any moment leaves nothing behind, and the size of
/// /dev/shm (64 MB in a default container) does not limit it. Peers open it
/// through /proc/<pid>/fd while the creator still holds the descriptor. Peers
/// map only a memfd of this user that is named and sealed as create() does it,
/// so that nobody can shrink the memory or make a peer write elsewhere. Errors
/// are std::system_error with the step that failed.
class Segment {
 public:
  static Segment create(size_t bytes);
  static Segment open(const SegmentLocator& locator);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const {
    return data_;
  }
  size_t bytes() const {
    return bytes_;
  }

  /// Valid on the creator until close_descriptor().
  SegmentLocator locator() const;

  /// Peers can no longer open the segment; those who did keep it.
  void close_descriptor();

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1; // the creator's, until close_descriptor()
};

} // namespace tessera::comm::shm
