#include "cli/style.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace tessera::cli {

Style Style::of_standard_output() {
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  const bool is_refused = no_color != nullptr && *no_color != '\0';
  const bool is_able =
      terminal != nullptr && std::string_view(terminal) != "dumb";
  return Style(!is_refused && is_able && ::isatty(STDOUT_FILENO) == 1);
}

std::string Style::in(const char* code, const std::string& text) const {
  return has_colours_ ? "\x1b[" + std::string(code) + "m" + text + "\x1b[0m"
                      : text;
}

} // namespace tessera::cli
