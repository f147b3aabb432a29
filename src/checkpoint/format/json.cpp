#include "checkpoint/format/json.h"

#include <set>
#include <string>
#include <vector>

#include "checkpoint/format/format_error.h"

namespace tessera::format {

nlohmann::json read_json(
    std::string_view text,
    uint64_t offset,
    int max_depth) {
  using Event = nlohmann::json::parse_event_t;
  std::vector<std::set<std::string>> names; // of the objects being read
  const auto watch = [&](int depth, Event event, nlohmann::json& parsed) {
    switch (event) {
      case Event::object_start:
        names.emplace_back();
        [[fallthrough]];
      case Event::array_start:
        if (depth >= max_depth) {
          throw FormatError(offset, "JSON nests too deeply");
        }
        break;
      case Event::object_end:
        names.pop_back();
        break;
      case Event::key:
        if (!names.back().insert(parsed.get<std::string>()).second) {
          throw FormatError(
              offset, in_quotes(parsed.get<std::string>()) + " appears twice");
        }
        break;
      case Event::array_end:
      case Event::value:
        break;
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::parse_error& error) {
    throw FormatError(offset + error.byte, "this is not JSON");
  } catch (const nlohmann::json::out_of_range&) {
    throw FormatError(offset, "JSON with a number that is too large");
  }
}

} // namespace tessera::format
