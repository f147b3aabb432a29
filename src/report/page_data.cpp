// The data for the script of a run's page. page/run.js reads these names.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>

#include "report/curve_data.h"
#include "report/json_value.h"
#include "report/page.h"
#include "report/run_data.h"
#include "report/timeline_data.h"

namespace tessera::report {
namespace {

using nlohmann::json;

// How much the page has room for.
constexpr size_t kPoints = 1800;
constexpr size_t kMarks = 600;
constexpr size_t kUnits = 1000;

json checkpoints_data(const Run& run) {
  json list = json::array();
  for (auto checkpoint =
           run.checkpoints.end() - std::min(run.checkpoints.size(), kListed);
       checkpoint != run.checkpoints.end();
       ++checkpoint) {
    list.push_back(
        {{"step", checkpoint->step},
         {"attempt", checkpoint->attempt},
         {"blocked_seconds", or_null(checkpoint->blocked_seconds)},
         {"path", checkpoint->path}});
  }
  return list;
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
    samples.push_back(sample_data(sample));
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

} // namespace

std::string page_data(const Run& run) {
  json data = curves_data(run, kPoints);
  data.update(
      {{"summary", summary_data(run)},
       {"memory", memory_data(run)},
       {"lanes", kLanes},
       {"timelines", timelines_data(run)},
       {"num_timelines", run.num_timelines},
       {"facts", facts_data(run)},
       {"num_attempts", run.attempts.size()},
       {"attempts", attempts_data(run)},
       {"num_checkpoints", run.checkpoints.size()},
       {"checkpoints", checkpoints_data(run)},
       {"checkpoint_marks", checkpoint_marks(run)},
       {"units", units_data(run)},
       {"samples", samples_data(run)},
       {"num_samples", run.num_samples},
       {"config", config_data(run)},
       {"problems", problems_data(run)}});
  return json_text(data);
}

} // namespace tessera::report
