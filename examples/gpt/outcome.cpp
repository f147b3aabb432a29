#include "outcome.h"

#include <nlohmann/json.hpp>

#include <cmath>

namespace gpt {
namespace {

using Json = nlohmann::ordered_json;

template <class Number>
Json json_or_null(const std::optional<Number>& value) {
  if constexpr (std::is_floating_point_v<Number>) {
    if (value && !std::isfinite(*value)) {
      return std::isnan(*value) ? "nan" : *value > 0 ? "inf" : "-inf";
    }
  }
  return value ? Json(*value) : Json();
}

Json json_or_null(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

} // namespace

std::string json_of(const Outcome& outcome) {
  const Json json{
      {"status", outcome.status},
      {"mode", json_or_null(outcome.mode)},
      {"step", json_or_null(outcome.step)},
      {"loss", json_or_null(outcome.loss)},
      {"validation_loss", json_or_null(outcome.validation_loss)},
      {"best_validation_loss", json_or_null(outcome.best_validation_loss)},
      {"seconds", json_or_null(outcome.seconds)},
      {"tokens_per_second", json_or_null(outcome.tokens_per_second)},
      {"mfu", json_or_null(outcome.mfu)},
      {"checkpoint", json_or_null(outcome.checkpoint)},
      {"text", json_or_null(outcome.text)},
      {"error", json_or_null(outcome.error)}};
  return json.dump(
      -1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

} // namespace gpt
