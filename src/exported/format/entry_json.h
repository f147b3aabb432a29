#pragma once

#include <nlohmann/json.hpp>

#include <string_view>

namespace tessera::exported {

/// Parses the text of an archive's entry. Throws FormatError that names the
/// entry.
nlohmann::json read_entry_json(
    std::string_view text,
    std::string_view entry,
    int max_depth);

} // namespace tessera::exported
