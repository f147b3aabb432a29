#include "train/log_json.h"

#include <cmath>
#include <sstream>

namespace tessera::train {
namespace {

std::string shape_of(at::ScalarType dtype, at::IntArrayRef sizes) {
  std::ostringstream text;
  text << c10::toString(dtype) << ' ' << sizes;
  return text.str();
}

Json json_of(const StateValue& value) {
  if (value.is_tensor()) {
    const at::Tensor& tensor = value.tensor();
    return tensor.defined()
        ? Json(shape_of(tensor.scalar_type(), tensor.sizes()))
        : Json();
  }
  if (value.is_sharded()) {
    return shape_of(value.sharded().dtype(), value.sharded().sizes());
  }
  if (value.is_int()) {
    return value.to_int();
  }
  if (value.is_double()) {
    return train::json_of(value.to_double());
  }
  if (value.is_bool()) {
    return value.to_bool();
  }
  if (value.is_string()) {
    return value.string();
  }
  if (value.is_list()) {
    Json list = Json::array();
    for (const StateValue& item : value.list()) {
      list.push_back(json_of(item));
    }
    return list;
  }
  return value.is_dict() ? train::json_of(value.dict()) : Json();
}

} // namespace

Json json_of(double value) {
  if (std::isfinite(value)) {
    return value;
  }
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json json_of(const StateDict& dict) {
  Json json = Json::object();
  for (const auto& [key, value] : dict) {
    json[key.text()] = json_of(value);
  }
  return json;
}

Json json_of(const MemoryByKind& memory) {
  return {
      {"shards", memory.shards},
      {"full", memory.full},
      {"gradients", memory.gradients},
      {"optimizer", memory.optimizer},
      {"activations", memory.activations},
      {"other", memory.other}};
}

Json json_of(const std::vector<UnitInfo>& units) {
  Json list = Json::array();
  for (const UnitInfo& unit : units) {
    list.push_back(
        {{"name", unit.name},
         {"parameters", unit.parameters},
         {"full_bytes", unit.full_bytes},
         {"shard_bytes", unit.shard_bytes}});
  }
  return list;
}

Json json_of(const std::vector<TimelineSpan>& spans) {
  Json list = Json::array();
  for (const TimelineSpan& span : spans) {
    list.push_back(
        {{"lane", lane_name(span.lane)},
         {"name", span.name},
         {"start", json_of(span.start)},
         {"end", json_of(span.end)}});
  }
  return list;
}

std::optional<Json> parse_json(std::string_view text) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? std::nullopt : std::optional(std::move(json));
}

std::string line_of(const Json& json) {
  return json.dump(
      -1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

} // namespace tessera::train
