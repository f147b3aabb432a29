#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace tessera::checkpoint {

/// For programs, with a line for each item. Names come from files: what is no
/// UTF-8 is replaced.
inline std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
      "\n";
}

} // namespace tessera::checkpoint
