#include "checkpoint/format/random_bytes.h"

#include <algorithm>
#include <cstring>

namespace tessera::format {
namespace {

// The description of a tensor lies at the two ends of a torch file.
constexpr uint64_t kWindowBytes = uint64_t{16} << 10;

} // namespace

std::string RandomBytes::text(uint64_t place, uint64_t length) const {
  std::string text(length, '\0');
  copy(place, reinterpret_cast<uint8_t*>(text.data()), length);
  return text;
}

std::vector<uint8_t> RandomBytes::bytes(uint64_t place, uint64_t length) const {
  std::vector<uint8_t> bytes(length);
  copy(place, bytes.data(), length);
  return bytes;
}

void RandomBytes::copy(uint64_t place, uint8_t* to, uint64_t length) const {
  if (length == 0) {
    return;
  }
  if (!read_) {
    std::memcpy(to, bytes_.data() + place, length);
    return;
  }
  if (length > kWindowBytes) {
    read_(place, to, length);
    return;
  }
  if (place < window_begin_ ||
      place + length > window_begin_ + window_.size()) {
    // Reads as much after the place as before it: archives are read in both
    // directions.
    const uint64_t begin = place - std::min(place, kWindowBytes / 2);
    const uint64_t end = std::min(size_, place + kWindowBytes);
    window_.resize(end - begin);
    window_begin_ = begin;
    try {
      read_(begin, window_.data(), window_.size());
    } catch (...) {
      window_.clear();
      throw;
    }
  }
  std::memcpy(to, window_.data() + (place - window_begin_), length);
}

} // namespace tessera::format
