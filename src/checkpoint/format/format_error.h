#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::format {

/// Bytes that do not follow the format, or ask for something that is refused.
/// Carries no path: whoever opened the file adds it.
class FormatError : public std::runtime_error {
 public:
  /// what() is "byte 12: text".
  FormatError(uint64_t offset, const std::string& text);
  /// For errors without a single place, such as a missing name.
  explicit FormatError(const std::string& text);

  std::optional<uint64_t> offset() const {
    return offset_;
  }

 private:
  std::optional<uint64_t> offset_;
};

/// Bytes that seem to follow the format but use a part of it that is not
/// supported. This does not indicate damage.
class UnsupportedFormat : public FormatError {
 public:
  using FormatError::FormatError;
};

/// The text in quotes, with escapes for unprintable characters, and cut if it
/// is long: names come from files that anyone may have written.
std::string in_quotes(std::string_view text);

} // namespace tessera::format
