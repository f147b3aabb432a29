#include <tessera/error.h>
#include <tessera/optim/one_cycle_lr.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "optim/group_values.h"
#include "optim/schedule_dictionary.h"

namespace tessera::optim {
namespace {

constexpr const char* kCall = "OneCycleLR";

int64_t num_steps(const OneCycleLROptions& options) {
  const auto checked = [](const char* key, int64_t value) {
    if (value <= 0) {
      raise<c10::ValueError>(
          {.call = kCall},
          fmt::format("{} is {}, must be above 0.", key, value));
    }
    return value;
  };
  if (options.total_steps()) {
    return checked("total_steps", *options.total_steps());
  }
  if (!options.epochs() || !options.steps_per_epoch()) {
    raise<c10::ValueError>(
        {.call = kCall},
        "the number of steps is not given. Set total_steps, or epochs and steps_per_epoch.");
  }
  return checked("epochs", *options.epochs()) *
      checked("steps_per_epoch", *options.steps_per_epoch());
}

const char* name_of(AnnealStrategy strategy) {
  return strategy == AnnealStrategy::Cos ? "cos" : "linear";
}

} // namespace

OneCycleLR::OneCycleLR(
    torch::optim::Optimizer& optimizer,
    OneCycleLROptions options)
    : EpochSchedule(optimizer, kCall, options.last_epoch()),
      total_steps_(num_steps(options)),
      anneal_strategy_(options.anneal_strategy()),
      cycle_momentum_(options.cycle_momentum()) {
  const double share = options.pct_start();
  if (!(share >= 0 && share <= 1)) {
    raise<c10::ValueError>(
        {.call = kCall},
        fmt::format("pct_start is {}, must be from 0 to 1.", share));
  }
  const auto steps = static_cast<double>(total_steps_);
  phases_.push_back(
      {share * steps - 1,
       "initial_lr",
       "max_lr",
       "max_momentum",
       "base_momentum"});
  if (options.three_phase()) {
    phases_.push_back(
        {2 * share * steps - 2,
         "max_lr",
         "initial_lr",
         "base_momentum",
         "max_momentum"});
    phases_.push_back(
        {steps - 1, "initial_lr", "min_lr", "max_momentum", "max_momentum"});
  } else {
    phases_.push_back(
        {steps - 1, "max_lr", "min_lr", "base_momentum", "max_momentum"});
  }
  prepare_groups(options);
  start();
}

void OneCycleLR::prepare_groups(const OneCycleLROptions& options) {
  const size_t count = groups().size();
  const auto max_lrs = options.max_lr().for_groups(count, "max_lr", kCall);
  const auto base_momenta =
      options.base_momentum().for_groups(count, "base_momentum", kCall);
  const auto max_momenta =
      options.max_momentum().for_groups(count, "max_momentum", kCall);
  if (cycle_momentum_) {
    const auto kind = groups().momentum_kind();
    if (kind == GroupValues::Momentum::None) {
      raise<c10::ValueError>(
          {.call = kCall},
          "cycle_momentum is on, but the optimizer has neither momentum nor betas. Switch it off.");
    }
    use_beta1_ = kind == GroupValues::Momentum::FirstBeta;
  }
  if (last_epoch() != -1) {
    return;
  }
  for (size_t group = 0; group < count; ++group) {
    const double first = max_lrs[group] / options.div_factor();
    groups().set(group, "initial_lr", first);
    groups().set(group, "max_lr", max_lrs[group]);
    groups().set(group, "min_lr", first / options.final_div_factor());
    if (cycle_momentum_) {
      groups().set_momentum(group, max_momenta[group]);
      groups().set(group, "max_momentum", max_momenta[group]);
      groups().set(group, "base_momentum", base_momenta[group]);
    }
  }
}

OneCycleLR::Place OneCycleLR::place() const {
  if (last_epoch() > total_steps_) {
    raise<c10::ValueError>(
        {.call = kCall},
        fmt::format(
            "the cycle has {} steps and was to be stepped {} times. Stop stepping, or make a longer cycle.",
            total_steps_,
            last_epoch()));
  }
  const auto now = static_cast<double>(last_epoch());
  double begin = 0;
  for (const Phase& phase : phases_) {
    if (now <= phase.end_step || &phase == &phases_.back()) {
      return {&phase, (now - begin) / (phase.end_step - begin)};
    }
    begin = phase.end_step;
  }
  return {};
}

double OneCycleLR::annealed(
    size_t group,
    const std::string& start,
    const std::string& end,
    double share) const {
  const auto value = [&](const std::string& key) {
    const auto found = groups().find(group, key);
    if (!found) {
      raise<c10::ValueError>(
          {.call = kCall},
          fmt::format(
              "param group {} has no \"{}\": it was added after the schedule was made, or the schedule was made with a last_epoch and the optimizer's dictionary was not loaded before. Make a new schedule, or load that dictionary.",
              group,
              key));
    }
    return *found;
  };
  const double from = value(start);
  const double to = value(end);
  if (anneal_strategy_ == AnnealStrategy::Linear) {
    return (to - from) * share + from;
  }
  const double height = std::cos(std::numbers::pi * share) + 1;
  return to + (from - to) / 2.0 * height;
}

std::vector<double> OneCycleLR::get_lr() const {
  const Place now = place();
  std::vector<double> lrs;
  for (size_t group = 0; group < groups().size(); ++group) {
    lrs.push_back(
        annealed(group, now.phase->start_lr, now.phase->end_lr, now.share));
  }
  return lrs;
}

void OneCycleLR::set_lrs(const std::vector<double>& lrs) {
  if (cycle_momentum_) {
    const Place now = place();
    std::vector<double> momenta;
    for (size_t group = 0; group < lrs.size(); ++group) {
      momenta.push_back(annealed(
          group,
          now.phase->start_momentum,
          now.phase->end_momentum,
          now.share));
    }
    for (size_t group = 0; group < lrs.size(); ++group) {
      groups().set_momentum(group, momenta[group]);
    }
  }
  EpochSchedule::set_lrs(lrs);
}

std::vector<OptionField> OneCycleLR::fields() {
  std::vector<OptionField> fields{
      {"total_steps", &total_steps_}, {"cycle_momentum", &cycle_momentum_}};
  if (cycle_momentum_) { // else Python has no such key
    fields.emplace_back("use_beta1", &use_beta1_);
  }
  return fields;
}

void OneCycleLR::write_more(StateDict& state) const {
  StateList phases;
  for (const Phase& phase : phases_) {
    const bool is_last = &phase == &phases_.back();
    phases.emplace_back(StateDict{
        {"end_step",
         is_last ? StateValue(static_cast<int64_t>(phase.end_step))
                 : StateValue(phase.end_step)},
        {"start_lr", phase.start_lr},
        {"end_lr", phase.end_lr},
        {"start_momentum", phase.start_momentum},
        {"end_momentum", phase.end_momentum}});
  }
  state.set("_schedule_phases", std::move(phases));
  state.set("_anneal_func_type", name_of(anneal_strategy_));
}

void OneCycleLR::read_more(const StateDict& state) {
  std::vector<Phase> phases;
  for (const StateValue& value : state.at("_schedule_phases").list()) {
    const StateDict& phase = value.dict();
    phases.push_back(
        {number_of(phase.at("end_step")),
         phase.at("start_lr").string(),
         phase.at("end_lr").string(),
         phase.at("start_momentum").string(),
         phase.at("end_momentum").string()});
  }
  const std::string& strategy = state.at("_anneal_func_type").string();
  if (phases.empty() || (strategy != "cos" && strategy != "linear")) {
    raise<c10::ValueError>(
        {.call = kCall},
        fmt::format(
            "the dictionary has {} phases and the curve \"{}\". There must be one phase at least, and \"cos\" or \"linear\".",
            phases.size(),
            strategy));
  }
  phases_ = std::move(phases);
  anneal_strategy_ =
      strategy == "cos" ? AnnealStrategy::Cos : AnnealStrategy::Linear;
}

} // namespace tessera::optim
