#include "plan/suggestions.h"

#include <functional>
#include <variant>

#include "plan/checked.h"
#include "plan/requested_model.h"
#include "plan/requested_setup.h"

namespace tessera::plan {
namespace {

struct Change {
  std::string flags;
  std::function<void(Request&)> apply;
};

/// The peak of a rank's device; nothing if the request cannot be planned, as
/// when a flag does not go with the strategy.
std::optional<int64_t> peak_of(const Request& request) {
  try {
    std::vector<std::string> notes;
    const Subject subject = subject_of(request, notes);
    return make_plan(subject, setup_of(request)).device.at_peak.total();
  } catch (const PlanError&) {
    return std::nullopt;
  }
}

/// Changes that leave the model, its batch and the number of ranks as they are,
/// those that cost the least first.
std::vector<Change> changes_of(const Request& request, const Subject& subject) {
  std::vector<Change> changes;
  const std::string strategy = strategy_of(request);
  if (strategy != "full_shard" && strategy != "hybrid") {
    changes.push_back({"--strategy full_shard", [](Request& changed) {
                         changed.strategy = "full_shard";
                         changed.reshard_after_forward = std::nullopt;
                       }});
  }
  // A program computes in the dtypes of its export.
  const bool is_program = std::holds_alternative<ProgramSubject>(subject);
  if (!request.param_dtype && !is_program) {
    changes.push_back({"--param-dtype bf16", [](Request& changed) {
                         changed.param_dtype = format::DType::BFloat16;
                       }});
  }
  if (request.checkpoint.empty() && !request.chunked_loss &&
      !request.loss_dtype) {
    changes.push_back({"--chunked-loss", [](Request& changed) {
                         changed.chunked_loss = true;
                       }});
  }
  if ((request.checkpoint.empty() || is_program) && !request.recompute) {
    changes.push_back(
        {"--recompute", [](Request& changed) { changed.recompute = true; }});
  }
  if (!request.offload && request.device == "cuda") {
    changes.push_back(
        {"--offload", [](Request& changed) { changed.offload = true; }});
  }
  return changes;
}

/// One sequence per backward, with as many sequences per step as before.
std::optional<Change> smaller_batch(
    const Request& request,
    const Subject& subject) {
  int64_t batch = request.batch.value_or(1);
  if (const auto* program = std::get_if<ProgramSubject>(&subject)) {
    const auto& run = program->run;
    batch = batch_range(*run.program).least > 1
        ? 1
        : GraphSizes(*run.program, run.sizes).chosen().batch.value_or(1);
  } else if (!request.checkpoint.empty()) {
    return std::nullopt;
  }
  if (batch <= 1) {
    return std::nullopt;
  }
  const int64_t times = request.accumulate * batch;
  return Change{
      "--batch 1 --accumulate " + std::to_string(times),
      [times](Request& changed) {
        changed.batch = 1;
        changed.accumulate = times;
      }};
}

/// Changes added to each other, as long as each lowers the peak and the peak is
/// above the limit. The first one alone is left out.
void add_combinations(
    const Request& request,
    const std::vector<Change>& changes,
    Limit limit,
    int64_t peak_now,
    std::vector<Suggestion>& suggestions) {
  Request together = request;
  std::string flags;
  int64_t lowest = peak_now;
  for (const Change& change : changes) {
    Request changed = together;
    change.apply(changed);
    const auto peak = peak_of(changed);
    if (lowest <= limit.bytes || !peak || *peak >= lowest) {
      continue;
    }
    const bool is_first = flags.empty();
    flags += (is_first ? "" : " ") + change.flags;
    together = changed;
    lowest = *peak;
    if (!is_first) {
      suggestions.push_back({flags, lowest, lowest <= limit.bytes});
    }
  }
}

} // namespace

std::vector<Suggestion> suggestions_for(
    const Request& request,
    const Subject& subject,
    Limit limit,
    std::optional<int64_t> smallest_world) {
  const int64_t peak_now = peak_of(request).value_or(0);
  auto changes = changes_of(request, subject);
  if (auto change = smaller_batch(request, subject)) {
    changes.push_back(std::move(*change));
  }
  auto singles = changes;
  if (smallest_world && request.mesh.empty()) {
    singles.push_back(
        {"--world " + std::to_string(*smallest_world),
         [&](Request& changed) { changed.world = *smallest_world; }});
  }
  std::vector<Suggestion> suggestions;
  bool is_enough = false;
  for (const Change& change : singles) {
    Request changed = request;
    change.apply(changed);
    const auto peak = peak_of(changed);
    if (peak && *peak < peak_now) {
      suggestions.push_back({change.flags, *peak, *peak <= limit.bytes});
      is_enough = is_enough || suggestions.back().fits;
    }
  }
  if (!is_enough) {
    add_combinations(request, changes, limit, peak_now, suggestions);
  }
  return suggestions;
}

} // namespace tessera::plan
