#pragma once

#include <nlohmann/json.hpp>

#include <string_view>

namespace tessera::format {

/// Parses JSON whose objects nest at most `max_depth` deep and do not repeat a
/// name. Throws FormatError, with places counted from `offset`.
nlohmann::json read_json(std::string_view text, uint64_t offset, int max_depth);

} // namespace tessera::format
