#include "exported/format/entry_json.h"

#include <string>

#include "checkpoint/format/format_error.h"
#include "checkpoint/format/json.h"

namespace tessera::exported {

nlohmann::json read_entry_json(
    std::string_view text,
    std::string_view entry,
    int max_depth) {
  try {
    return format::read_json(text, 0, max_depth);
  } catch (const format::FormatError& error) {
    throw format::FormatError(std::string(entry) + ": " + error.what());
  }
}

} // namespace tessera::exported
