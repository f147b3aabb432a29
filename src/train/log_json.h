// The contents of a run's log, as JSON.
#pragma once

#include <tessera/state/state_dict.h>
#include <tessera/train/monitor.h>

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::train {

using Json = nlohmann::ordered_json;

/// JSON has no numbers that are not finite: they become "nan", "inf", "-inf".
Json json_of(double value);
/// Tensors by dtype and shape.
Json json_of(const StateDict& dict);
Json json_of(const MemoryByKind& memory);
Json json_of(const std::vector<UnitInfo>& units);
Json json_of(const std::vector<TimelineSpan>& spans);
/// Nothing for text that is not JSON.
std::optional<Json> parse_json(std::string_view text);
/// JSON on one line; bytes that are not UTF-8 become U+FFFD.
std::string line_of(const Json& json);

} // namespace tessera::train
