// Where the values of JSON text stand, so that text can be changed in place.
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace tessera::format {

struct JsonSpan {
  size_t begin = 0;
  size_t end = 0;
  /// Of a member's name with its quotes; empty for items and for the root.
  size_t name_begin = 0;
  size_t name_end = 0;
  /// Number of the object or array that holds it; its own for the root.
  size_t parent = 0;
  char kind = '\0'; // the first character: '{', '[', '"', a digit, ...

  bool has_name() const {
    return name_end > name_begin;
  }
  bool is_scalar() const {
    return kind != '{' && kind != '[';
  }
};

/// The values, each before those that it holds. None if brackets or quotes are
/// left open; other faults go unseen.
std::vector<JsonSpan> find_json_values(std::string_view text);

} // namespace tessera::format
