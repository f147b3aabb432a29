#include "engine/names.h"

namespace tessera::engine {

std::string clean_name(std::string_view name) {
  std::string clean;
  while (!name.empty()) {
    const size_t dot = name.find('.');
    const std::string_view segment = name.substr(0, dot);
    name.remove_prefix(dot == name.npos ? name.size() : dot + 1);
    if (segment == kCheckpointSegment || segment == "_fsdp_wrapped_module") {
      continue;
    }
    if (!clean.empty()) {
      clean += '.';
    }
    clean += segment;
  }
  return clean;
}

} // namespace tessera::engine
