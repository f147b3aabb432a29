// Numbers and texts as bytes, for the messages that ranks exchange while
// saving.
#pragma once

#include <tessera/comm/group.h>
#include <tessera/error.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/byte_vector.h"

namespace tessera::checkpoint {

class WireWriter {
 public:
  void number(uint64_t value) {
    const auto* begin = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), begin, begin + sizeof value);
  }
  void numbers(const std::vector<int64_t>& values) {
    number(values.size());
    for (const int64_t value : values) {
      number(static_cast<uint64_t>(value));
    }
  }
  void text(std::string_view value) {
    number(value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }

  Bytes take() {
    return std::move(bytes_);
  }

 private:
  Bytes bytes_;
};

/// Reads what a WireWriter of a peer wrote.
class WireReader {
 public:
  explicit WireReader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  uint64_t number() {
    uint64_t value = 0;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(number());
    for (int64_t& value : values) {
      value = static_cast<int64_t>(number());
    }
    return values;
  }
  std::string text() {
    const auto part = take(number());
    return {part.begin(), part.end()};
  }

 private:
  std::span<const uint8_t> take(uint64_t count) {
    TESSERA_INTERNAL_ASSERT(count <= bytes_.size(), "a peer's message is cut");
    const auto part = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return part;
  }

  std::span<const uint8_t> bytes_;
};

} // namespace tessera::checkpoint
