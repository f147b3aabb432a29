#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::format {

/// Bytes that are not of the format, or ask for what is refused. Knows no path:
/// whoever opened the file adds it.
class FormatError : public std::runtime_error {
 public:
  /// what() is "byte 12: text".
  FormatError(uint64_t offset, const std::string& text);
  /// For what has no single place, such as a missing name.
  explicit FormatError(const std::string& text);

  std::optional<uint64_t> offset() const {
    return offset_;
  }

 private:
  std::optional<uint64_t> offset_;
};

/// What is of the format, as far as one can tell, but uses a part of it that is
/// not read here: that says nothing about damage.
class UnsupportedFormat : public FormatError {
 public:
  using FormatError::FormatError;
};

/// In quotes, with escapes for what cannot be printed, cut where it is long:
/// names come from files that anyone may have written.
std::string in_quotes(std::string_view text);

} // namespace tessera::format
