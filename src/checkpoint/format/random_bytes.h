#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/bytes.h"

namespace tessera::format {

/// Bytes of which only a few are needed: in memory, or in a file of which only
/// those few are read. Places and lengths must lie within size(). For use by
/// one thread.
class RandomBytes {
 public:
  /// `bytes` must outlive it.
  RandomBytes(ByteSpan bytes) : size_(bytes.size()), bytes_(bytes) {}
  /// `read` copies `length` bytes from `place` on; what it throws comes out of
  /// the functions below.
  using Read =
      std::function<void(uint64_t place, uint8_t* to, uint64_t length)>;
  RandomBytes(uint64_t size, Read read) : size_(size), read_(std::move(read)) {}

  uint64_t size() const {
    return size_;
  }
  /// The number at `place`.
  template <class T>
  T get(uint64_t place) const {
    T value;
    copy(place, reinterpret_cast<uint8_t*>(&value), sizeof(T));
    return value;
  }
  std::string text(uint64_t place, uint64_t length) const;
  std::vector<uint8_t> bytes(uint64_t place, uint64_t length) const;

 private:
  void copy(uint64_t place, uint8_t* to, uint64_t length) const;

  uint64_t size_;
  ByteSpan bytes_; // in memory
  Read read_; // empty: in memory
  mutable std::vector<uint8_t> window_; // what was read last
  mutable uint64_t window_begin_ = 0;
};

} // namespace tessera::format
