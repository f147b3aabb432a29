// Numbers and texts as bytes, for peers on processors of one kind. Numbers are
// as the processor has them; a text is its length (8 bytes) and its bytes.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// Appends to a std::string or a std::vector<uint8_t>.
template <class Bytes>
void append_raw(Bytes& bytes, const void* data, size_t size) {
  const auto* begin = static_cast<const uint8_t*>(data);
  bytes.insert(bytes.end(), begin, begin + size);
}

template <class T, class Bytes>
void append_number(Bytes& bytes, T value) {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
  append_raw(bytes, &value, sizeof value);
}

template <class Bytes>
void append_text(Bytes& bytes, std::string_view text) {
  append_number<uint64_t>(bytes, text.size());
  append_raw(bytes, text.data(), text.size());
}

/// Writes every number with 8 bytes.
class ByteWriter {
 public:
  void raw(const void* data, size_t size) {
    append_raw(bytes_, data, size);
  }
  void byte(uint8_t value) {
    bytes_.push_back(value);
  }
  void number(std::integral auto value) {
    append_number(bytes_, static_cast<uint64_t>(value));
  }
  void number(double value) {
    append_number(bytes_, value);
  }
  void text(std::string_view text) {
    append_text(bytes_, text);
  }
  /// Their count, and each.
  void numbers(std::span<const int64_t> values) {
    number(values.size());
    raw(values.data(), values.size_bytes());
  }

  std::vector<uint8_t> take() {
    return std::move(bytes_);
  }

 private:
  std::vector<uint8_t> bytes_;
};

/// `byte 16: 8 bytes expected, 3 are left.`
struct BadBytes : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Reads what a ByteWriter wrote. Trusts nothing: every length is checked
/// against what is left before anything is allocated, and BadBytes is thrown
/// where the bytes end too early. The bytes must outlive the reader.
class ByteReader {
 public:
  explicit ByteReader(std::span<const uint8_t> bytes)
      : all_(bytes), rest_(bytes) {}

  std::span<const uint8_t> raw(uint64_t size) {
    if (size > rest_.size()) {
      refuse(
          std::to_string(size) + " bytes expected, " +
          std::to_string(rest_.size()) + " are left");
    }
    const auto part = rest_.first(size);
    rest_ = rest_.subspan(size);
    return part;
  }
  uint8_t byte() {
    return raw(1)[0];
  }
  template <class T = uint64_t>
  T number() {
    static_assert(std::is_arithmetic_v<T> && sizeof(T) == 8);
    T value;
    std::memcpy(&value, raw(sizeof value).data(), sizeof value);
    return value;
  }
  /// A count of things that have at least `least_each` bytes each.
  uint64_t count(uint64_t least_each) {
    const uint64_t value = number();
    if (value > rest_.size() / least_each) {
      refuse(
          "a count of " + std::to_string(value) + ", where " +
          std::to_string(rest_.size()) + " bytes are left");
    }
    return value;
  }
  std::string text() {
    const auto part = raw(count(1));
    return {part.begin(), part.end()};
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(count(sizeof(int64_t)));
    for (int64_t& value : values) {
      value = number<int64_t>();
    }
    return values;
  }

  size_t left() const {
    return rest_.size();
  }
  /// Throws BadBytes, with the place that the reader has come to.
  [[noreturn]] void refuse(const std::string& what) const {
    throw BadBytes(
        "byte " + std::to_string(all_.size() - rest_.size()) + ": " + what +
        ".");
  }

 private:
  const std::span<const uint8_t> all_;
  std::span<const uint8_t> rest_;
};

} // namespace tessera
