#include "report/log_line.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

#include "report/bounds.h"
#include "report/report_text.h"
#include "report/step_line.h"

namespace tessera::report {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 64;
constexpr size_t kMaxName = 200; // bytes, as all of these
constexpr size_t kMaxSpanName = 80;
constexpr size_t kMaxPath = 500;
constexpr size_t kMaxSample = 4000;
constexpr size_t kMaxError = 1000;
constexpr size_t kMaxConfigValue = 300;
constexpr size_t kMaxConfigRows = 500;
constexpr size_t kMaxUnits = 100000;

// Writing a value as text recurses, so its depth is checked first.
int depth_of(std::string_view text) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      i += c == '\\' ? 1 : 0;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

json parse_object(std::string_view text) {
  if (depth_of(text) > kMaxDepth) {
    throw LineError(
        "is nested deeper than " + std::to_string(kMaxDepth) + " levels");
  }
  json line = json::parse(
      text.begin(), text.end(), /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (line.is_discarded()) {
    throw NotJson("is not JSON");
  }
  if (!line.is_object()) {
    throw LineError("is not an object");
  }
  return line;
}

// ---- Fields ----------------------------------------------------------------

[[noreturn]] void fail(const std::string& name, const std::string& why) {
  throw LineError("\"" + name + "\" " + why);
}

/// Null if the field is absent or null.
const json* find(const json& object, const std::string& name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

const json& need(const json& object, const std::string& name) {
  const json* value = find(object, name);
  if (!value) {
    fail(name, "is missing");
  }
  return *value;
}

std::optional<double> number(
    const json& object,
    const std::string& name,
    double max) {
  const json* value = find(object, name);
  if (!value) {
    return std::nullopt;
  }
  if (!value->is_number()) {
    fail(name, "is not a number");
  }
  const auto result = value->get<double>();
  if (!(result >= 0 && result <= max)) {
    fail(name, "is out of bounds");
  }
  return result;
}

std::optional<int64_t> count(const json& object, const std::string& name) {
  const json* value = find(object, name);
  if (value && !value->is_number_integer()) {
    fail(name, "is not a count");
  }
  const auto result = number(object, name, kMaxCount);
  return result ? std::optional(static_cast<int64_t>(*result)) : std::nullopt;
}

int64_t need_count(const json& object, const std::string& name) {
  need(object, name);
  return *count(object, name);
}

/// A number that may also be "nan", "inf" or "-inf".
std::optional<double> any_number(const json& object, const std::string& name) {
  const json* value = find(object, name);
  if (!value || value->is_number()) {
    return value ? std::optional(value->get<double>()) : std::nullopt;
  }
  const auto named = value->is_string()
      ? named_number(value->get_ref<const std::string&>())
      : std::nullopt;
  if (!named) {
    fail(name, "is not a number");
  }
  return named;
}

double need_any_number(const json& object, const std::string& name) {
  need(object, name);
  return *any_number(object, name);
}

std::string text(const json& object, const std::string& name, size_t max) {
  const json* value = find(object, name);
  if (!value) {
    return {};
  }
  if (!value->is_string()) {
    fail(name, "is not a text");
  }
  return clipped(value->get<std::string>(), max);
}

/// The elements of a list; none if the field is absent.
const json& list(const json& object, const std::string& name) {
  static const json kEmpty = json::array();
  const json* value = find(object, name);
  if (value && !value->is_array()) {
    fail(name, "is not a list");
  }
  return value ? *value : kEmpty;
}

const json& as_object(const json& value, const std::string& where) {
  if (!value.is_object()) {
    fail(where, "has an element that is not an object");
  }
  return value;
}

// ---- Kinds -----------------------------------------------------------------

std::string plain_text(const json& value) {
  return clipped(
      value.is_string() ? value.get<std::string>()
                        : value.dump(
                              -1,
                              ' ',
                              /*ensure_ascii=*/false,
                              json::error_handler_t::replace),
      kMaxConfigValue);
}

using ConfigRows = std::vector<std::pair<std::string, std::string>>;

// Stops one row after the limit.
void flatten(const json& value, const std::string& path, ConfigRows* rows) {
  if (rows->size() > kMaxConfigRows) {
    return;
  }
  if (!value.is_object() || value.empty()) {
    rows->emplace_back(clipped(path, kMaxName), plain_text(value));
    return;
  }
  for (const auto& [name, part] : value.items()) {
    flatten(part, path.empty() ? name : path + "." + name, rows);
  }
}

Step parse_step(const json& line) {
  Step step{.step = need_count(line, "step")};
  const auto set = [&step](
                       double* place, std::optional<double> value, auto field) {
    *place = value.value_or(0);
    step.has |= value ? field : 0;
  };
  set(&step.loss, any_number(line, "loss"), Step::kLoss);
  set(&step.lr, any_number(line, "lr"), Step::kLr);
  set(&step.grad_norm, any_number(line, "grad_norm"), Step::kGradNorm);
  set(&step.tokens, number(line, "tokens", kMaxCount), Step::kTokens);
  set(&step.seconds, number(line, "seconds", kMaxStepSeconds), Step::kSeconds);
  if (const json* skipped = find(line, "skipped")) {
    if (!skipped->is_boolean()) {
      fail("skipped", "is not true or false");
    }
    step.is_skipped = skipped->get<bool>();
  }
  if (const json* memory = find(line, "memory")) {
    if (!memory->is_object()) {
      fail("memory", "is not an object");
    }
    step.has |= Step::kMemory;
    for (size_t i = 0; i < kMemoryKinds.size(); ++i) {
      step.memory[i] = number(*memory, kMemoryKinds[i], kMaxCount).value_or(0);
    }
  }
  return step;
}

std::vector<Unit> parse_units(const json& line) {
  const json& values = list(line, "units");
  if (values.size() > kMaxUnits) {
    fail("units", "has more than " + std::to_string(kMaxUnits));
  }
  std::vector<Unit> units;
  for (const json& value : values) {
    const json& unit = as_object(value, "units");
    units.push_back(
        {.name = text(unit, "name", kMaxName),
         .parameters = count(unit, "parameters").value_or(0),
         .full_bytes = count(unit, "full_bytes").value_or(0),
         .shard_bytes = count(unit, "shard_bytes").value_or(0)});
  }
  return units;
}

StartLine parse_start(const json& line) {
  if (count(line, "format").value_or(1) != 1) {
    fail("format", "is newer than 1, the version that this program supports");
  }
  StartLine start;
  Attempt& attempt = start.attempt;
  attempt.number = count(line, "attempt").value_or(0);
  attempt.start_step = count(line, "step").value_or(0);
  attempt.last_step = attempt.start_step;
  attempt.world = count(line, "world").value_or(0);
  attempt.name = text(line, "name", kMaxName);
  attempt.device = text(line, "device", kMaxName);
  attempt.host = text(line, "host", kMaxName);
  if (const json* versions = find(line, "versions")) {
    for (const auto& [name, value] : as_object(*versions, "versions").items()) {
      attempt.versions.emplace_back(
          clipped(name, kMaxName), clipped(plain_text(value), kMaxName));
    }
    attempt.versions.resize(std::min<size_t>(attempt.versions.size(), 16));
  }
  if (const json* config = find(line, "config")) {
    flatten(*config, "", &start.config);
    if (start.config.size() > kMaxConfigRows) {
      start.config.back() = {"...", "the rest is left out"};
    }
  }
  start.units = parse_units(line);
  return start;
}

std::optional<size_t> lane_of(const json& span) {
  const std::string name = text(span, "lane", kMaxName);
  const auto found = std::find(kLanes.begin(), kLanes.end(), name);
  return found == kLanes.end() ? std::nullopt
                               : std::optional<size_t>(found - kLanes.begin());
}

Span parse_span(const json& value, size_t lane) {
  need(value, "start");
  need(value, "end");
  Span span{
      .lane = lane,
      .name = text(value, "name", kMaxSpanName),
      .start = *number(value, "start", kMaxStepSeconds),
      .end = *number(value, "end", kMaxStepSeconds)};
  if (span.end < span.start) {
    fail("end", "of a span is before its start");
  }
  return span;
}

Timeline parse_timeline(const json& line) {
  Timeline timeline{.step = need_count(line, "step")};
  for (const json& value : list(line, "ranks")) {
    const json& rank = as_object(value, "ranks");
    timeline.ranks.push_back({.rank = need_count(rank, "rank")});
    for (const json& span : list(rank, "spans")) {
      if (const auto lane = lane_of(as_object(span, "spans"))) {
        timeline.ranks.back().spans.push_back(parse_span(span, *lane));
      }
    }
  }
  return timeline;
}

decltype(LogLine::content) parse_content(
    const json& line,
    const std::string& kind) {
  if (kind == "start") {
    return parse_start(line);
  }
  if (kind == "step") {
    return parse_step(line);
  }
  if (kind == "resume") {
    return ResumeLine{need_count(line, "step"), text(line, "path", kMaxPath)};
  }
  if (kind == "eval") {
    return Eval{need_count(line, "step"), need_any_number(line, "loss")};
  }
  if (kind == "sample") {
    return Sample{
        need_count(line, "step"),
        text(line, "prompt", kMaxSample),
        text(line, "text", kMaxSample)};
  }
  if (kind == "checkpoint") {
    return Checkpoint{
        .step = need_count(line, "step"),
        .blocked_seconds = number(line, "blocked_seconds", kMaxStepSeconds),
        .path = text(line, "path", kMaxPath)};
  }
  if (kind == "timeline") {
    return parse_timeline(line);
  }
  if (kind == "end") {
    return EndLine{
        text(line, "reason", kMaxName), text(line, "error", kMaxError)};
  }
  return OtherLine{};
}

} // namespace

LogLine parse_line(std::string_view line_text) {
  if (auto step = parse_plain_step(line_text)) {
    return *std::move(step);
  }
  const json line = parse_object(line_text);
  const json& kind = need(line, "kind");
  if (!kind.is_string()) {
    fail("kind", "is not a text");
  }
  return {
      .time = number(line, "time", kMaxTime),
      .content = parse_content(line, kind.get_ref<const std::string&>())};
}

} // namespace tessera::report
