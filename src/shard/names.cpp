#include "shard/names.h"

#include <array>

namespace tessera::shard {
namespace {

constexpr std::array<std::string_view, 2> kWrappers{
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module"};

bool is_wrapper(std::string_view segment) {
  return segment == kWrappers[0] || segment == kWrappers[1];
}

} // namespace

std::string clean_name(std::string_view name) {
  std::string clean;
  while (!name.empty()) {
    const size_t dot = name.find('.');
    const std::string_view segment = name.substr(0, dot);
    name.remove_prefix(dot == std::string_view::npos ? name.size() : dot + 1);
    if (!is_wrapper(segment)) {
      clean += clean.empty() ? "" : ".";
      clean += segment;
    }
  }
  return clean;
}

} // namespace tessera::shard
