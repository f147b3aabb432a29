#include "report/run_data.h"

#include <algorithm>
#include <optional>

#include "report/json_value.h"
#include "report/summary.h"

namespace tessera::report {
namespace {

using nlohmann::json;

constexpr size_t kWorlds = 8;

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

json loss_or_null(const std::optional<double>& loss) {
  return loss ? compact(*loss) : json();
}

json eval_or_null(const std::optional<Eval>& eval) {
  return eval ? json{{"step", eval->step}, {"loss", compact(eval->loss)}}
              : json();
}

} // namespace

json summary_data(const Run& run) {
  const Summary summary = summarize(run);
  const std::vector<int64_t> worlds(
      summary.worlds.end() - std::min(summary.worlds.size(), kWorlds),
      summary.worlds.end());
  return {
      {"state", summary.state},
      {"last_step", summary.last_step},
      {"num_steps", summary.num_steps},
      {"num_repeated", summary.num_repeated},
      {"num_skipped", summary.num_skipped},
      {"first_loss", loss_or_null(summary.first_loss)},
      {"final_loss", loss_or_null(summary.final_loss)},
      {"final_loss_step", summary.final_loss_step},
      {"last_eval", eval_or_null(summary.last_eval)},
      {"best_eval", eval_or_null(summary.best_eval)},
      {"tokens", summary.tokens},
      {"seconds", summary.seconds},
      {"tokens_per_second", or_null(summary.median_tokens_per_second)},
      {"peak_memory_bytes", or_null(summary.peak_memory_bytes)},
      {"peak_memory_step", summary.peak_memory_step},
      {"num_worlds", summary.worlds.size()},
      {"worlds", worlds}};
}

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

json attempts_data(const Run& run) {
  json list = json::array();
  for (auto attempt =
           run.attempts.end() - std::min(run.attempts.size(), kListed);
       attempt != run.attempts.end();
       ++attempt) {
    list.push_back(attempt_data(*attempt));
  }
  return list;
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

json sample_data(const Sample& sample) {
  return {
      {"step", sample.step}, {"prompt", sample.prompt}, {"text", sample.text}};
}

} // namespace tessera::report
