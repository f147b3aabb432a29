#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

namespace tessera {

std::string format_error(const ErrorSite& site, std::string_view what) {
  std::string place;
  auto add = [&place](const std::string& part) {
    place += place.empty() ? "" : ", ";
    place += part;
  };
  if (site.rank >= 0) {
    add(site.world_size > 0
            ? fmt::format("rank {}/{}", site.rank, site.world_size)
            : fmt::format("rank {}", site.rank));
  }
  if (!site.group.empty()) {
    add(fmt::format("group \"{}\"", site.group));
  }
  if (!site.unit.empty()) {
    add(fmt::format("unit \"{}\"", site.unit));
  }
  if (!site.parameter.empty()) {
    add(fmt::format("parameter \"{}\"", site.parameter));
  }
  if (!site.path.empty()) {
    add(fmt::format("\"{}\"", site.path));
  }
  std::string text = site.call.empty() ? "" : fmt::format("[{}] ", site.call);
  if (!place.empty()) {
    text += place + ": ";
  }
  text += what;
  return text;
}

namespace detail {

void internal_assert_fail(
    const char* condition,
    const char* file,
    int line,
    const std::string& what) {
  std::string_view name = file;
  name.remove_prefix(name.rfind('/') + 1); // npos + 1 == 0
  throw c10::Error(
      fmt::format(
          "Tessera broke its own rule `{}` ({}:{}): {}. This is a bug in "
          "Tessera, not in your program: please report it with this text.",
          condition,
          name,
          line,
          what),
      nullptr);
}

} // namespace detail
} // namespace tessera
