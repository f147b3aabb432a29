#include <tessera/error.h>
#include <tessera/optim/lr_scheduler.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "libtorch/recording.h"
#include "optim/group_values.h"
#include "optim/option_fields.h"
#include "optim/schedule_dictionary.h"

namespace tessera::optim {
namespace {

constexpr const char* kInitialLr = "initial_lr";

} // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, std::string name)
    : optimizer_(optimizer),
      name_(std::move(name)),
      groups_(GroupValues::of(optimizer)) {}

LRScheduler::~LRScheduler() = default;

std::vector<double> LRScheduler::current_lrs() const {
  std::vector<double> lrs;
  for (size_t group = 0; group < groups_->size(); ++group) {
    lrs.push_back(groups_->lr(group));
  }
  return lrs;
}

EpochSchedule::EpochSchedule(
    torch::optim::Optimizer& optimizer,
    std::string name,
    int64_t last_epoch)
    : LRScheduler(optimizer, std::move(name)), last_epoch_(last_epoch) {}

void EpochSchedule::start() {
  for (size_t group = 0; group < groups().size(); ++group) {
    const auto known = groups().find(group, kInitialLr);
    if (!known && last_epoch_ != -1) {
      raise<c10::ValueError>(
          {.call = name()},
          fmt::format(
              "last_epoch is {}, but param group {} has no \"initial_lr\". {}",
              last_epoch_,
              group,
              groups().are_in_optimizer()
                  ? "Load the optimizer's dictionary first, or make the schedule with last_epoch -1 and load the schedule's dictionary."
                  : "LibTorch's optimizers cannot keep it: make the schedule with last_epoch -1 and load the schedule's dictionary."));
    }
  }
  base_lrs_.clear();
  for (size_t group = 0; group < groups().size(); ++group) {
    if (!groups().find(group, kInitialLr)) {
      groups().set(group, kInitialLr, groups().lr(group));
    }
    base_lrs_.push_back(*groups().find(group, kInitialLr));
  }
  initial_step();
}

void EpochSchedule::initial_step() {
  step_count_ = 0;
  is_initial_ = true;
  try {
    step();
  } catch (...) {
    is_initial_ = false;
    throw;
  }
  is_initial_ = false;
}

void EpochSchedule::step() {
  move_to(last_epoch_ + 1, Form::Recursive);
  ++step_count_;
}

void EpochSchedule::move_to(int64_t epoch, Form form) {
  libtorch::refuse_in_recording(
      name(), "Step the schedule after the captured step.");
  const int64_t before = std::exchange(last_epoch_, epoch);
  try {
    const std::vector<double> lrs =
        form == Form::Closed ? closed_form_lr() : get_lr();
    for (size_t group = 0; group < lrs.size(); ++group) {
      if (!std::isfinite(lrs[group])) {
        raise<c10::ValueError>(
            {.call = name()},
            fmt::format(
                "the learning rate of param group {} would be {} at epoch {}. Correct the schedule's settings.",
                group,
                lrs[group],
                epoch));
      }
    }
    TESSERA_INTERNAL_ASSERT(
        lrs.size() == groups().size(), "a schedule left out a param group");
    set_lrs(lrs);
  } catch (...) {
    last_epoch_ = before;
    throw;
  }
}

void EpochSchedule::set_lrs(const std::vector<double>& lrs) {
  for (size_t group = 0; group < lrs.size(); ++group) {
    groups().set_lr(group, lrs[group]);
  }
  last_lr_ = lrs;
}

std::vector<double> EpochSchedule::closed_form_lr() const {
  return get_lr();
}

std::vector<double> EpochSchedule::scaled_lrs(double factor) const {
  std::vector<double> lrs = current_lrs();
  for (double& lr : lrs) {
    lr *= factor;
  }
  return lrs;
}

void EpochSchedule::need_base_lrs() const {
  if (base_lrs_.size() != groups().size()) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format(
            "the optimizer has {} param groups, it had {} when the schedule was made, and this schedule needs the learning rate that each began with. Make a new schedule after add_param_group().",
            groups().size(),
            base_lrs_.size()));
  }
}

std::vector<OptionField> EpochSchedule::fields() {
  return {};
}

void EpochSchedule::write_more(StateDict& /*state*/) const {}

void EpochSchedule::read_more(const StateDict& /*state*/) {}

std::vector<OptionField> EpochSchedule::all_fields() {
  std::vector<OptionField> all = fields();
  all.emplace_back("last_epoch", &last_epoch_);
  all.emplace_back("_step_count", &step_count_);
  return all;
}

StateDict EpochSchedule::state_dict() {
  StateDict state;
  write_fields(all_fields(), state);
  write_more(state);
  state.set("base_lrs", list_of(base_lrs_));
  state.set("_is_initial", false);
  state.set("_get_lr_called_within_step", false);
  state.set("_last_lr", list_of(last_lr_));
  return state;
}

void EpochSchedule::read(const StateDict& state) {
  const ErrorSite site{.call = name()};
  check_schedule_keys(state_dict(), state, site);
  read_fields(all_fields(), state, site, "the dictionary");
  base_lrs_ = numbers_of(state.at("base_lrs"));
  last_lr_ = numbers_of(state.at("_last_lr"));
  if (base_lrs_.size() > groups().size()) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "the dictionary has \"base_lrs\" of {} param groups, the optimizer has {}. Make the optimizer with the same groups.",
            base_lrs_.size(),
            groups().size()));
  }
  read_more(state);
}

void EpochSchedule::load_state_dict(const StateDict& state) {
  read_or_restore(
      [this](const StateDict& from) { read(from); }, state, state_dict());
}

std::optional<double> PerGroup::for_all() const {
  const auto* value = std::get_if<double>(&values_);
  return value == nullptr ? std::nullopt : std::optional<double>(*value);
}

std::vector<double> PerGroup::for_groups(
    size_t num_groups,
    std::string_view key,
    std::string_view call) const {
  if (const auto value = for_all()) {
    return std::vector<double>(num_groups, *value);
  }
  const auto& values = std::get<std::vector<double>>(values_);
  if (values.size() != num_groups) {
    raise<c10::ValueError>(
        {.call = call},
        fmt::format(
            "{} has {} values, the optimizer has {} param groups. Pass one value for each, or one for all.",
            key,
            values.size(),
            num_groups));
  }
  return values;
}

} // namespace tessera::optim
