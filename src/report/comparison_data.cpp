// The data for the script of the page that compares runs. page/comparison.js
// reads these names.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>

#include "report/curve_data.h"
#include "report/json_value.h"
#include "report/page.h"
#include "report/run_data.h"
#include "report/summary.h"

namespace tessera::report {
namespace {

using nlohmann::json;

// The curves of all runs together have so many points.
constexpr size_t kPointsOfAll = 3600;
constexpr size_t kAttemptsOfRun = 40; // that are marked: the newest

// ---- Settings --------------------------------------------------------------

/// The value of each run, or nothing.
using Values = std::vector<std::optional<std::string>>;

/// Settings by their names, in the order in which they are first seen.
class Settings {
 public:
  explicit Settings(size_t num_runs) : num_runs_(num_runs) {}

  void add(size_t run, const std::string& name, const std::string& value) {
    const auto [place, is_new] = places_.emplace(name, rows_.size());
    if (is_new) {
      rows_.emplace_back(name, Values(num_runs_));
    }
    rows_[place->second].second[run] = value;
  }

  json take() const {
    json list = json::array();
    for (const auto& [name, values] : rows_) {
      json texts = json::array();
      for (const auto& value : values) {
        texts.push_back(or_null(value));
      }
      const bool differs =
          std::count(values.begin(), values.end(), values.front()) <
          static_cast<std::ptrdiff_t>(values.size());
      list.push_back(
          {{"name", name}, {"values", std::move(texts)}, {"differs", differs}});
    }
    return list;
  }

 private:
  size_t num_runs_;
  std::map<std::string, size_t> places_;
  std::vector<std::pair<std::string, Values>> rows_;
};

std::string ranks_text(const Run& run) {
  std::string text;
  for (const int64_t world : summarize(run).worlds) {
    text += (text.empty() ? "" : ", then ") + std::to_string(world);
  }
  return text;
}

/// What ran and where, then the configuration.
json settings_data(const std::vector<NamedRun>& runs) {
  Settings facts(runs.size());
  Settings config(runs.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i].run;
    const Attempt& last = run.attempts.back();
    for (const auto& [name, value] :
         {std::pair<std::string, std::string>{"device", last.device},
          {"host", last.host},
          {"ranks", ranks_text(run)}}) {
      if (!value.empty()) {
        facts.add(i, name, value);
      }
    }
    for (const auto& [name, value] : last.versions) {
      facts.add(i, "version of " + name, value);
    }
    for (const ConfigRow& row : run.config) {
      config.add(i, row.path, row.value);
    }
  }
  json all = facts.take();
  for (json& row : config.take()) {
    all.push_back(std::move(row));
  }
  return all;
}

// ---- Runs ------------------------------------------------------------------

/// Where the newest attempts began.
json begins_data(const Run& run) {
  json list = json::array();
  for (auto attempt =
           run.attempts.end() - std::min(run.attempts.size(), kAttemptsOfRun);
       attempt != run.attempts.end();
       ++attempt) {
    list.push_back(
        {{"start_step", attempt->start_step},
         {"resumed_step", or_null(attempt->resumed_step)},
         {"is_continuation", attempt->is_continuation},
         {"world", attempt->world}});
  }
  return list;
}

json run_data(const NamedRun& named, size_t limit) {
  const Run& run = named.run;
  json data = curves_data(run, limit);
  data.update(
      {{"label", named.label},
       {"folder", named.folder.string()},
       {"summary", summary_data(run)},
       {"memory", memory_curve(run, limit)},
       {"num_attempts", run.attempts.size()},
       {"attempts", begins_data(run)},
       {"error", run.attempts.back().error},
       {"sample",
        run.samples.empty() ? json() : sample_data(run.samples.back())},
       {"problems", problems_data(run)}});
  return data;
}

} // namespace

std::string comparison_data(const std::vector<NamedRun>& runs) {
  json list = json::array();
  for (const NamedRun& named : runs) {
    list.push_back(
        run_data(named, kPointsOfAll / std::max<size_t>(runs.size(), 2)));
  }
  return json_text(
      {{"runs", std::move(list)}, {"settings", settings_data(runs)}});
}

} // namespace tessera::report
