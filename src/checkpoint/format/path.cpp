#include "checkpoint/format/path.h"

namespace tessera::format {

std::string_view why_it_leaves(std::string_view path) {
  if (path.empty()) {
    return "is empty";
  }
  if (path.find('\0') != std::string_view::npos) {
    return "has a zero byte";
  }
  if (path.front() == '/') {
    return "is absolute";
  }
  while (!path.empty()) {
    const auto slash = path.find('/');
    const auto part = path.substr(0, slash);
    if (part == "..") {
      return "leaves its folder";
    }
    if (part.empty() || part == ".") {
      return "is not in its simplest form";
    }
    if (slash == std::string_view::npos) {
      return {};
    }
    path.remove_prefix(slash + 1);
  }
  return "ends with a slash";
}

} // namespace tessera::format
