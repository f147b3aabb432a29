#include "report/curve_data.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "report/decimate.h"
#include "report/json_value.h"

namespace tessera::report {
namespace {

using nlohmann::json;

// How much the page has room for.
constexpr size_t kPointsOfMean = 450;
constexpr size_t kOldPoints = 600; // over all superseded parts
constexpr size_t kOldParts = 40;
constexpr size_t kMemoryPoints = 900;

using Value = std::function<std::optional<double>(const Step&)>;

Value field(Step::Field which, double Step::*value) {
  return [=](const Step& step) {
    return (step.has & which) != 0 ? std::optional(step.*value) : std::nullopt;
  };
}

std::optional<double> tokens_per_second(const Step& step) {
  if ((step.has & Step::kTokens) == 0 || !(step.seconds > 0)) {
    return std::nullopt;
  }
  return step.tokens / step.seconds;
}

/// What a curve is made of.
struct Points {
  std::vector<int64_t> steps;
  std::vector<double> values;

  void add(int64_t step, double value) {
    steps.push_back(step);
    values.push_back(value);
  }
};

/// At most `limit` points.
json thinned(const Points& points, size_t limit) {
  json curve{{"steps", json::array()}, {"values", json::array()}};
  for (const size_t i : decimate(points.values, limit)) {
    curve["steps"].push_back(points.steps[i]);
    curve["values"].push_back(compact(points.values[i]));
  }
  return curve;
}

/// The same; with the means if points were left out.
json with_mean(const Points& points, size_t limit) {
  json curve = thinned(points, limit);
  if (points.values.size() > limit) {
    json mean{
        {"steps", json::array()},
        {"values", json::array()},
        {"counts", json::array()}};
    for (const Mean& part :
         means(points.values, std::min(limit / 2, kPointsOfMean))) {
      mean["steps"].push_back(points.steps[part.middle]);
      mean["values"].push_back(compact(part.value));
      mean["counts"].push_back(part.count);
    }
    curve["mean"] = std::move(mean);
  }
  return curve;
}

Points points_of(const std::vector<Step>& steps, const Value& value) {
  Points points;
  for (const Step& step : steps) {
    if (const auto found = value(step)) {
      points.add(step.step, *found);
    }
  }
  return points;
}

Points points_of(const std::vector<Eval>& evals) {
  Points points;
  for (const Eval& eval : evals) {
    points.add(eval.step, eval.loss);
  }
  return points;
}

/// One entry for each superseded part, the newest ones.
json old_parts(
    const Run& run,
    const std::function<json(const Superseded&, size_t)>& make) {
  const size_t count = std::min(run.superseded.size(), kOldParts);
  json parts = json::array();
  for (auto part = run.superseded.end() - count; part != run.superseded.end();
       ++part) {
    json curve = make(*part, std::max<size_t>(kOldPoints / count, 8));
    if (!curve["steps"].empty()) {
      parts.push_back(std::move(curve));
    }
  }
  return parts;
}

json curve_of(const Run& run, const Value& value, size_t limit) {
  json curve = with_mean(points_of(run.steps, value), limit);
  curve["old"] = old_parts(run, [&](const Superseded& part, size_t room) {
    return thinned(points_of(part.steps, value), room);
  });
  return curve;
}

json evals_of(const Run& run, size_t limit) {
  json dots = thinned(points_of(run.evals), limit);
  dots["old"] = old_parts(run, [](const Superseded& part, size_t room) {
    return thinned(points_of(part.evals), room);
  });
  return dots;
}

std::optional<double> memory_of(const Step& step) {
  return (step.has & Step::kMemory) != 0 ? std::optional(step.memory_total())
                                         : std::nullopt;
}

} // namespace

json curves_data(const Run& run, size_t limit) {
  return {
      {"loss", curve_of(run, field(Step::kLoss, &Step::loss), limit)},
      {"lr", curve_of(run, field(Step::kLr, &Step::lr), limit)},
      {"grad_norm",
       curve_of(run, field(Step::kGradNorm, &Step::grad_norm), limit)},
      {"tokens_per_second", curve_of(run, tokens_per_second, limit)},
      {"evals", evals_of(run, limit / 2)}};
}

json memory_curve(const Run& run, size_t limit) {
  return curve_of(run, memory_of, limit);
}

json memory_data(const Run& run) {
  std::vector<const Step*> steps;
  std::vector<double> totals;
  for (const Step& step : run.steps) {
    if ((step.has & Step::kMemory) != 0) {
      steps.push_back(&step);
      totals.push_back(step.memory_total());
    }
  }
  json data{{"steps", json::array()}, {"kinds", json::array()}};
  for (const char* kind : kMemoryKinds) {
    data["kinds"].push_back({{"name", kind}, {"values", json::array()}});
  }
  for (const size_t i : decimate(totals, kMemoryPoints)) {
    data["steps"].push_back(steps[i]->step);
    for (size_t kind = 0; kind < kMemoryKinds.size(); ++kind) {
      data["kinds"][kind]["values"].push_back(
          std::llround(steps[i]->memory[kind]));
    }
  }
  return data;
}

} // namespace tessera::report
