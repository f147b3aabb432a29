// The data for the page's script. page/page.js reads these names.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>

#include "report/decimate.h"
#include "report/page.h"
#include "report/summary.h"
#include "report/timeline_shares.h"

namespace tessera::report {
namespace {

using nlohmann::json;

// How much the page has room for.
constexpr size_t kPoints = 1800;
constexpr size_t kPointsOfMean = 4;
constexpr size_t kOldPoints = 600; // over all superseded parts
constexpr size_t kOldParts = 40;
constexpr size_t kMemoryPoints = 900;
constexpr size_t kMarks = 600;
constexpr size_t kListed = 200;
constexpr size_t kUnits = 1000;
constexpr size_t kRanks = 16;
constexpr size_t kWorlds = 8;
constexpr size_t kSpans = 3000; // in one timeline

/// Eight digits: more than a float has, half of what a double prints.
json compact(double value) {
  if (std::isnan(value)) {
    return "nan";
  }
  if (std::isinf(value)) {
    return value > 0 ? "inf" : "-inf";
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.8g", value);
  return std::strtod(text, nullptr);
}

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json();
}

// ---- Curves ----------------------------------------------------------------

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

/// At most `limit` points; if there were many more, also the means.
json thinned(
    const std::vector<int64_t>& steps,
    const std::vector<double>& values,
    size_t limit) {
  json curve{{"steps", json::array()}, {"values", json::array()}};
  const auto add = [](json* to, int64_t step, double value) {
    (*to)["steps"].push_back(step);
    (*to)["values"].push_back(compact(value));
  };
  for (const size_t i : decimate(values, limit)) {
    add(&curve, steps[i], values[i]);
  }
  if (values.size() > 2 * limit) {
    json mean{{"steps", json::array()}, {"values", json::array()}};
    for (const Mean& part : means(values, limit / kPointsOfMean)) {
      add(&mean, steps[part.middle], part.value);
    }
    curve["mean"] = std::move(mean);
  }
  return curve;
}

json curve_of(
    const std::vector<Step>& steps,
    const Value& value,
    size_t limit) {
  std::vector<int64_t> places;
  std::vector<double> values;
  for (const Step& step : steps) {
    if (const auto found = value(step)) {
      places.push_back(step.step);
      values.push_back(*found);
    }
  }
  return thinned(places, values, limit);
}

json dots_of(const std::vector<Eval>& evals, size_t limit) {
  std::vector<int64_t> places;
  std::vector<double> values;
  for (const Eval& eval : evals) {
    places.push_back(eval.step);
    values.push_back(eval.loss);
  }
  return thinned(places, values, limit);
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

json with_old_parts(const Run& run, const Value& value) {
  json curve = curve_of(run.steps, value, kPoints);
  curve["old"] = old_parts(run, [&](const Superseded& part, size_t limit) {
    return curve_of(part.steps, value, limit);
  });
  return curve;
}

json evals_data(const Run& run) {
  json dots = dots_of(run.evals, kPoints / 2);
  dots["old"] = old_parts(run, [](const Superseded& part, size_t limit) {
    return dots_of(part.evals, limit);
  });
  return dots;
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

// ---- Timelines -------------------------------------------------------------

/// Numbers that stand for names that occur often.
class NameTable {
 public:
  size_t number(const std::string& name) {
    const auto [place, is_new] = numbers_.emplace(name, names_.size());
    if (is_new) {
      names_.push_back(name);
    }
    return place->second;
  }
  json take() {
    return std::move(names_);
  }

 private:
  std::map<std::string, size_t> numbers_;
  json names_ = json::array();
};

/// The longest spans that there is room for, sorted by their start.
std::vector<Span> shown_spans(std::vector<Span> spans, size_t room) {
  if (spans.size() > room) {
    std::nth_element(
        spans.begin(),
        spans.begin() + room,
        spans.end(),
        [](const Span& a, const Span& b) {
          return a.end - a.start > b.end - b.start;
        });
    spans.resize(room);
  }
  std::stable_sort(
      spans.begin(), spans.end(), [](const Span& a, const Span& b) {
        return a.start < b.start;
      });
  return spans;
}

json rank_data(const RankTimeline& rank, size_t room, NameTable* names) {
  json spans = json::array();
  for (const Span& span : shown_spans(rank.spans, room)) {
    spans.push_back(
        {span.lane,
         names->number(span.name),
         compact(span.start),
         compact(span.end)});
  }
  json busy = json::array();
  for (const double seconds : busy_seconds(rank)) {
    busy.push_back(compact(seconds));
  }
  return {
      {"rank", rank.rank},
      {"spans", std::move(spans)},
      {"left_out", rank.spans.size() - std::min(rank.spans.size(), room)},
      {"busy", std::move(busy)}};
}

json timeline_data(const Timeline& timeline) {
  const size_t count = std::min(timeline.ranks.size(), kRanks);
  NameTable names;
  json ranks = json::array();
  for (size_t i = 0; i < count; ++i) {
    ranks.push_back(rank_data(timeline.ranks[i], kSpans / count, &names));
  }
  return {
      {"step", timeline.step},
      {"seconds", compact(end_of(timeline))},
      {"num_ranks", timeline.ranks.size()},
      {"ranks", std::move(ranks)},
      {"names", names.take()}};
}

json timelines_data(const Run& run) {
  json timelines = json::array();
  for (const Timeline& timeline : run.timelines) {
    timelines.push_back(timeline_data(timeline));
  }
  return timelines;
}

// ---- Lists -----------------------------------------------------------------

json attempt_data(const Attempt& attempt) {
  return {
      {"number", attempt.number},
      {"start_step", attempt.start_step},
      {"last_step", attempt.last_step},
      {"world", attempt.world},
      {"began", or_null(attempt.began)},
      {"seconds", attempt.seconds()},
      {"resumed_step", or_null(attempt.resumed_step)},
      {"resumed_path", attempt.resumed_path},
      {"end_reason", or_null(attempt.end_reason)},
      {"error", attempt.error},
      {"is_continuation", attempt.is_continuation}};
}

/// What ran and where, as the last attempt reports.
json facts_data(const Run& run) {
  const Attempt& last = run.attempts.back();
  json versions = json::array();
  for (const auto& [name, value] : last.versions) {
    versions.push_back({name, value});
  }
  return {
      {"name", last.name},
      {"device", last.device},
      {"host", last.host},
      {"versions", std::move(versions)},
      {"began", or_null(run.attempts.front().began)},
      {"last_seen", or_null(last.last_seen)}};
}

/// The newest of `values`, as many as are listed.
template <class T>
json newest(
    const std::vector<T>& values,
    const std::function<json(const T&)>& make) {
  json list = json::array();
  for (auto value = values.end() - std::min(values.size(), kListed);
       value != values.end();
       ++value) {
    list.push_back(make(*value));
  }
  return list;
}

json checkpoints_data(const Run& run) {
  return newest<Checkpoint>(run.checkpoints, [](const Checkpoint& checkpoint) {
    return json{
        {"step", checkpoint.step},
        {"attempt", checkpoint.attempt},
        {"blocked_seconds", or_null(checkpoint.blocked_seconds)},
        {"path", checkpoint.path}};
  });
}

/// Steps with a checkpoint, thinned out where they are too many to tell apart.
json checkpoint_marks(const Run& run) {
  std::set<int64_t> steps;
  for (const Checkpoint& checkpoint : run.checkpoints) {
    steps.insert(checkpoint.step);
  }
  const std::vector<int64_t> all(steps.begin(), steps.end());
  json marks = json::array();
  const size_t count = std::min(all.size(), kMarks);
  for (size_t i = 0; i < count; ++i) {
    marks.push_back(all[all.size() * i / count]);
  }
  return marks;
}

json units_data(const Run& run) {
  json rows = json::array();
  double parameters = 0;
  double full_bytes = 0;
  double shard_bytes = 0;
  for (const Unit& unit : run.units) {
    parameters += static_cast<double>(unit.parameters);
    full_bytes += static_cast<double>(unit.full_bytes);
    shard_bytes += static_cast<double>(unit.shard_bytes);
    if (rows.size() < kUnits) {
      rows.push_back(
          {unit.name, unit.parameters, unit.full_bytes, unit.shard_bytes});
    }
  }
  return {
      {"count", run.units.size()},
      {"rows", std::move(rows)},
      {"total", {parameters, full_bytes, shard_bytes}}};
}

json samples_data(const Run& run) {
  json samples = json::array();
  for (const Sample& sample : run.samples) {
    samples.push_back(
        {{"step", sample.step},
         {"prompt", sample.prompt},
         {"text", sample.text}});
  }
  return samples;
}

json config_data(const Run& run) {
  json rows = json::array();
  for (const ConfigRow& row : run.config) {
    rows.push_back({row.path, row.value, or_null(row.was)});
  }
  return rows;
}

json problems_data(const Run& run) {
  json first = json::array();
  for (const Problem& problem : run.problems) {
    first.push_back({{"line", problem.line}, {"what", problem.what}});
  }
  return {
      {"count", run.num_problems},
      {"torn", run.num_torn},
      {"lines", run.num_lines},
      {"first", std::move(first)}};
}

json loss_or_null(const std::optional<double>& loss) {
  return loss ? compact(*loss) : json();
}

json summary_data(const Run& run) {
  const Summary summary = summarize(run);
  const std::vector<int64_t> worlds(
      summary.worlds.end() - std::min(summary.worlds.size(), kWorlds),
      summary.worlds.end());
  json best;
  if (summary.best_eval) {
    best = {
        {"step", summary.best_eval->step},
        {"loss", compact(summary.best_eval->loss)}};
  }
  return {
      {"state", summary.state},
      {"last_step", summary.last_step},
      {"num_steps", summary.num_steps},
      {"num_repeated", summary.num_repeated},
      {"first_loss", loss_or_null(summary.first_loss)},
      {"final_loss", loss_or_null(summary.final_loss)},
      {"final_loss_step", summary.final_loss_step},
      {"best_eval", best},
      {"tokens", summary.tokens},
      {"seconds", summary.seconds},
      {"tokens_per_second", or_null(summary.median_tokens_per_second)},
      {"peak_memory_bytes", or_null(summary.peak_memory_bytes)},
      {"peak_memory_step", summary.peak_memory_step},
      {"num_worlds", summary.worlds.size()},
      {"worlds", worlds}};
}

} // namespace

std::string page_data(const Run& run) {
  const json data{
      {"summary", summary_data(run)},
      {"loss", with_old_parts(run, field(Step::kLoss, &Step::loss))},
      {"lr", with_old_parts(run, field(Step::kLr, &Step::lr))},
      {"grad_norm",
       with_old_parts(run, field(Step::kGradNorm, &Step::grad_norm))},
      {"tokens_per_second", with_old_parts(run, tokens_per_second)},
      {"evals", evals_data(run)},
      {"memory", memory_data(run)},
      {"lanes", kLanes},
      {"timelines", timelines_data(run)},
      {"num_timelines", run.num_timelines},
      {"facts", facts_data(run)},
      {"num_attempts", run.attempts.size()},
      {"attempts", newest<Attempt>(run.attempts, attempt_data)},
      {"num_checkpoints", run.checkpoints.size()},
      {"checkpoints", checkpoints_data(run)},
      {"checkpoint_marks", checkpoint_marks(run)},
      {"units", units_data(run)},
      {"samples", samples_data(run)},
      {"num_samples", run.num_samples},
      {"config", config_data(run)},
      {"problems", problems_data(run)}};
  return data.dump(
      -1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

} // namespace tessera::report
