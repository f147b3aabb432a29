#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/optim/reduce_lr_on_plateau.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "libtorch/recording.h"
#include "optim/group_values.h"
#include "optim/option_fields.h"
#include "optim/schedule_dictionary.h"

namespace tessera::optim {
namespace {

constexpr const char* kPlateau = "ReduceLROnPlateau";

double worst(PlateauMode mode) {
  const double infinite = std::numeric_limits<double>::infinity();
  return mode == PlateauMode::Min ? infinite : -infinite;
}

/// The metric of each rank.
std::vector<double> metrics_of_all(const Group& group, double metric) {
  std::vector<uint8_t> bytes(sizeof(metric));
  std::memcpy(bytes.data(), &metric, sizeof(metric));
  std::vector<double> metrics;
  for (const auto& of_rank : group.all_gather_bytes(bytes, kPlateau)) {
    TESSERA_INTERNAL_ASSERT(
        of_rank.size() == sizeof(metric), "a rank sent another size");
    std::memcpy(&metrics.emplace_back(), of_rank.data(), sizeof(metric));
  }
  return metrics;
}

bool are_same(const std::vector<double>& metrics) {
  return std::all_of(metrics.begin(), metrics.end(), [&](double metric) {
    return metric == metrics.front() ||
        (std::isnan(metric) && std::isnan(metrics.front()));
  });
}

/// Which of two names a value has; throws c10::ValueError for another name.
bool is_first(
    const StateDict& state,
    const char* key,
    const char* first,
    const char* second) {
  const std::string& name = state.at(key).string();
  if (name != first && name != second) {
    raise<c10::ValueError>(
        {.call = kPlateau},
        fmt::format(
            "the dictionary has \"{}\": \"{}\", it must be \"{}\" or \"{}\".",
            key,
            name,
            first,
            second));
  }
  return name == first;
}

} // namespace

ReduceLROnPlateau::ReduceLROnPlateau(
    torch::optim::Optimizer& optimizer,
    ReduceLROnPlateauOptions options)
    : groups_(GroupValues::of(optimizer)),
      options_(std::move(options)),
      min_lrs_(
          options_.min_lr().for_groups(groups_->size(), "min_lr", kPlateau)),
      best_(worst(options_.mode())) {
  if (!(options_.factor() < 1)) {
    raise<c10::ValueError>(
        {.call = kPlateau},
        fmt::format("factor is {}, must be below 1.", options_.factor()));
  }
  for (size_t group = 0; group < groups_->size(); ++group) {
    last_lr_.push_back(groups_->lr(group));
  }
}

ReduceLROnPlateau::~ReduceLROnPlateau() = default;

double ReduceLROnPlateau::agreed(double metric) const {
  const Group group = options_.group() ? *options_.group()
      : is_initialized()               ? world()
                                       : Group();
  if (!group.valid() || group.size() == 1) {
    return metric;
  }
  const std::vector<double> metrics = metrics_of_all(group, metric);
  if (options_.rank_metrics() == RankMetrics::Same) {
    if (!are_same(metrics)) {
      raise<DisagreementError>(
          {.call = kPlateau, .group = group.name()},
          fmt::format(
              "ranks pass different metrics: {}, by rank. Pass the metric of all ranks, or let RankMetrics::Mean decide.",
              fmt::join(metrics, ", ")));
    }
    return metric;
  }
  double sum = 0;
  for (const double one : metrics) {
    sum += one;
  }
  return sum / static_cast<double>(metrics.size());
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const bool is_rel = options_.threshold_mode() == ThresholdMode::Rel;
  const double threshold = options_.threshold();
  if (options_.mode() == PlateauMode::Min) {
    return metric < (is_rel ? best_ * (1.0 - threshold) : best_ - threshold);
  }
  return metric > (is_rel ? best_ * (threshold + 1.0) : best_ + threshold);
}

void ReduceLROnPlateau::step(double metric) {
  libtorch::refuse_in_recording(
      "ReduceLROnPlateau::step", "Step the schedule after the captured step.");
  const double current = agreed(metric);
  const bool better = is_better(current);
  int64_t bad = better ? 0 : num_bad_epochs_ + 1;
  int64_t cooldown = cooldown_counter_;
  if (cooldown > 0) {
    --cooldown;
    bad = 0;
  }
  if (bad > options_.patience()) {
    reduce_lr();
    cooldown = options_.cooldown();
    bad = 0;
  }
  if (better) {
    best_ = current;
  }
  ++last_epoch_;
  num_bad_epochs_ = bad;
  cooldown_counter_ = cooldown;
  last_lr_.clear();
  for (size_t group = 0; group < groups_->size(); ++group) {
    last_lr_.push_back(groups_->lr(group));
  }
}

void ReduceLROnPlateau::reduce_lr() {
  if (min_lrs_.size() != groups_->size()) {
    // Groups were added; a list does not say what is theirs.
    min_lrs_ =
        options_.min_lr().for_groups(groups_->size(), "min_lr", kPlateau);
  }
  for (size_t group = 0; group < groups_->size(); ++group) {
    const double before = groups_->lr(group);
    const double after = std::max(before * options_.factor(), min_lrs_[group]);
    if (before - after > options_.eps()) {
      groups_->set_lr(group, after);
    }
  }
}

std::vector<OptionField> ReduceLROnPlateau::fields() {
  return {
      {"factor", &options_.factor()},
      {"patience", &options_.patience()},
      {"cooldown", &options_.cooldown()},
      {"eps", &options_.eps()},
      {"last_epoch", &last_epoch_},
      {"threshold", &options_.threshold()},
      {"best", &best_},
      {"cooldown_counter", &cooldown_counter_},
      {"num_bad_epochs", &num_bad_epochs_}};
}

StateDict ReduceLROnPlateau::state_dict() {
  StateDict state;
  write_fields(fields(), state);
  const auto for_all = options_.min_lr().for_all();
  state.set("default_min_lr", for_all ? StateValue(*for_all) : StateValue());
  state.set("min_lrs", list_of(min_lrs_));
  state.set("_last_lr", list_of(last_lr_));
  state.set("mode_worse", worst(options_.mode()));
  state.set("mode", options_.mode() == PlateauMode::Min ? "min" : "max");
  state.set(
      "threshold_mode",
      options_.threshold_mode() == ThresholdMode::Rel ? "rel" : "abs");
  return state;
}

void ReduceLROnPlateau::read(const StateDict& state) {
  const ErrorSite site{.call = kPlateau};
  check_schedule_keys(state_dict(), state, site);
  read_fields(fields(), state, site, "the dictionary");
  options_.mode(
      is_first(state, "mode", "min", "max") ? PlateauMode::Min
                                            : PlateauMode::Max);
  options_.threshold_mode(
      is_first(state, "threshold_mode", "rel", "abs") ? ThresholdMode::Rel
                                                      : ThresholdMode::Abs);
  min_lrs_ = numbers_of(state.at("min_lrs"));
  last_lr_ = numbers_of(state.at("_last_lr"));
  const StateValue& for_all = state.at("default_min_lr");
  options_.min_lr(
      for_all.is_none() ? PerGroup(min_lrs_) : PerGroup(number_of(for_all)));
}

void ReduceLROnPlateau::load_state_dict(const StateDict& state) {
  read_or_restore(
      [this](const StateDict& from) { read(from); }, state, state_dict());
}

} // namespace tessera::optim
