// The bytes of a pickle, opcode by opcode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/format/bytes.h"
#include "checkpoint/format/format_error.h"
#include "checkpoint/format/pickle_opcodes.h"

namespace tessera::format {

/// Throws FormatError with the place of an opcode that wants more bytes than
/// there are.
class PickleInput {
 public:
  /// Reads the protocol. Throws UnsupportedFormat for an old or unknown one.
  explicit PickleInput(ByteSpan bytes) : bytes_(bytes) {
    if (bytes.size() >= UINT32_MAX) {
      throw FormatError("a pickle of 4 GiB or more");
    }
    if (bytes_.size() < 2 || bytes_[0] != static_cast<uint8_t>(Opcode::Proto)) {
      throw FormatError(0, "this is not a pickle of protocol 2 or later");
    }
    if (bytes_[1] < 2 || bytes_[1] > 5) {
      throw UnsupportedFormat(
          1, "pickle protocol " + std::to_string(bytes_[1]) + ", not 2 to 5");
    }
    place_ = 2;
  }

  size_t size() const {
    return bytes_.size();
  }
  size_t num_left() const {
    return bytes_.size() - place_;
  }
  /// Where the opcode being executed begins.
  size_t at() const {
    return at_;
  }
  /// Its name.
  std::string opcode() const {
    return opcode_name(bytes_[at_]);
  }

  uint8_t next_opcode() {
    at_ = place_;
    if (place_ == bytes_.size()) {
      throw FormatError(place_, "the pickle ends before its STOP");
    }
    return bytes_[place_++];
  }

  template <class T>
  T number() {
    return load_le<T>(take(sizeof(T)), 0);
  }

  // Checked before anything is allocated: `count` is what the file says.
  ByteSpan take(uint64_t count) {
    if (count > bytes_.size() - place_) {
      refuse(
          "wants " + std::to_string(count) + " bytes, " +
          std::to_string(bytes_.size() - place_) + " are left");
    }
    const auto taken = bytes_.subspan(place_, count);
    place_ += count;
    return taken;
  }

  std::string_view line() {
    const auto rest = as_text(bytes_.subspan(place_));
    const auto end = rest.find('\n');
    if (end == std::string_view::npos) {
      refuse("has a name without an end");
    }
    place_ += end + 1;
    return rest.substr(0, end);
  }

  void expect_end() const {
    if (place_ != bytes_.size()) {
      throw FormatError(
          place_,
          std::to_string(num_left()) + " bytes after the end of the pickle");
    }
  }

  [[noreturn]] void refuse(const std::string& what) const {
    throw FormatError(at_, opcode() + " " + what);
  }

 private:
  const ByteSpan bytes_;
  size_t place_ = 0;
  size_t at_ = 0;
};

} // namespace tessera::format
