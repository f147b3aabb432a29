#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace tessera::checkpoint {

/// JSON for programs, with a line for each item. Names come from files: bytes
/// that are not UTF-8 are replaced.
inline std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";
}

} // namespace tessera::checkpoint
