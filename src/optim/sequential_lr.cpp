#include <tessera/error.h>
#include <tessera/optim/sequential_lr.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "optim/group_values.h"
#include "optim/schedule_dictionary.h"

namespace tessera::optim {
namespace {

constexpr const char* kSchedulers = "_schedulers";

/// Throws unless there are schedules, all of one optimizer.
template <class Scheduler>
void check_parts(
    const std::vector<std::shared_ptr<Scheduler>>& parts,
    const torch::optim::Optimizer* optimizer,
    const char* call) {
  if (parts.empty()) {
    raise<c10::ValueError>(
        {.call = call}, "there is no schedule. Pass one at least.");
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i]) {
      raise<c10::ValueError>(
          {.call = call}, fmt::format("schedule {} is a null pointer.", i));
    }
    const auto* expected =
        optimizer != nullptr ? optimizer : &parts.front()->optimizer();
    if (&parts[i]->optimizer() != expected) {
      raise<c10::ValueError>(
          {.call = call},
          fmt::format(
              "schedule {}, a {}, belongs to another optimizer. Make all schedules with the same one.",
              i,
              parts[i]->name()));
    }
  }
}

template <class Scheduler>
const std::vector<std::shared_ptr<Scheduler>>& checked_parts(
    const std::vector<std::shared_ptr<Scheduler>>& parts,
    const char* call) {
  check_parts<Scheduler>(parts, nullptr, call);
  return parts;
}

template <class Scheduler>
StateList dicts_of(const std::vector<std::shared_ptr<Scheduler>>& parts) {
  StateList dicts;
  for (const auto& part : parts) {
    dicts.emplace_back(part->state_dict());
  }
  return dicts;
}

template <class Scheduler>
void load_parts(
    const std::vector<std::shared_ptr<Scheduler>>& parts,
    const StateDict& state,
    const std::string& call) {
  const StateList& dicts = state.at(kSchedulers).list();
  if (dicts.size() != parts.size()) {
    raise<c10::ValueError>(
        {.call = call},
        fmt::format(
            "the dictionary has {} schedules, this one is made of {}. Make it of the same schedules.",
            dicts.size(),
            parts.size()));
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i]->load_state_dict(dicts[i].dict());
  }
}

double initial_lr_of(const GroupValues& groups, size_t group) {
  const auto found = groups.find(group, "initial_lr");
  if (!found) {
    raise<c10::ValueError>(
        {.call = "SequentialLR"},
        fmt::format(
            "param group {} was added after the schedules were made. Make them anew.",
            group));
  }
  return *found;
}

} // namespace

SequentialLR::SequentialLR(
    torch::optim::Optimizer& optimizer,
    std::vector<std::shared_ptr<EpochSchedule>> schedulers,
    std::vector<int64_t> milestones)
    : LRScheduler(optimizer, "SequentialLR"),
      schedulers_(std::move(schedulers)),
      milestones_(std::move(milestones)) {
  check_parts(schedulers_, &optimizer, "SequentialLR");
  if (milestones_.size() + 1 != schedulers_.size() ||
      !std::is_sorted(milestones_.begin(), milestones_.end())) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format(
            "there are {} milestones for {} schedules. Pass, in order, the epoch at which each schedule but the first begins.",
            milestones_.size(),
            schedulers_.size()));
  }
  // Each part has made its initial step by itself. Undo that, and make that of
  // the first part only.
  for (size_t group = 0; group < groups().size(); ++group) {
    groups().set_lr(group, initial_lr_of(groups(), group));
  }
  for (const auto& part : schedulers_) {
    --part->last_epoch_;
  }
  EpochSchedule& first = part_at(0);
  first.initial_step();
  last_lr_ = first.get_last_lr();
}

EpochSchedule& SequentialLR::part_at(int64_t epoch) const {
  const auto next =
      std::upper_bound(milestones_.begin(), milestones_.end(), epoch);
  return *schedulers_[static_cast<size_t>(next - milestones_.begin())];
}

void SequentialLR::step() {
  const int64_t epoch = last_epoch_ + 1;
  EpochSchedule& part = part_at(epoch);
  if (std::binary_search(milestones_.begin(), milestones_.end(), epoch)) {
    part.move_to(0, EpochSchedule::Form::Closed);
  } else {
    part.step();
  }
  last_epoch_ = epoch;
  last_lr_ = part.get_last_lr();
}

StateDict SequentialLR::state_dict() {
  StateList milestones(milestones_.begin(), milestones_.end());
  return {
      {"_milestones", std::move(milestones)},
      {"last_epoch", last_epoch_},
      {"_last_lr", list_of(last_lr_)},
      {kSchedulers, dicts_of(schedulers_)}};
}

void SequentialLR::read(const StateDict& state) {
  check_schedule_keys(state_dict(), state, {.call = name()});
  std::vector<int64_t> milestones;
  for (const StateValue& value : state.at("_milestones").list()) {
    milestones.push_back(value.to_int());
  }
  if (milestones.size() != milestones_.size() ||
      !std::is_sorted(milestones.begin(), milestones.end())) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format(
            "the dictionary has {} milestones, this schedule {}; they must be in order. Make it of the same schedules.",
            milestones.size(),
            milestones_.size()));
  }
  std::vector<double> last_lr = numbers_of(state.at("_last_lr"));
  const int64_t last_epoch = state.at("last_epoch").to_int();
  load_parts(schedulers_, state, name());
  milestones_ = std::move(milestones);
  last_lr_ = std::move(last_lr);
  last_epoch_ = last_epoch;
}

void SequentialLR::load_state_dict(const StateDict& state) {
  read_or_restore(
      [this](const StateDict& from) { read(from); }, state, state_dict());
}

ChainedScheduler::ChainedScheduler(
    std::vector<std::shared_ptr<LRScheduler>> schedulers)
    : LRScheduler(
          checked_parts(schedulers, "ChainedScheduler").front()->optimizer(),
          "ChainedScheduler"),
      schedulers_(std::move(schedulers)) {
  last_lr_ = current_lrs();
}

void ChainedScheduler::step() {
  for (const auto& part : schedulers_) {
    part->step();
  }
  last_lr_ = current_lrs();
}

StateDict ChainedScheduler::state_dict() {
  return {
      {"_last_lr", list_of(last_lr_)}, {kSchedulers, dicts_of(schedulers_)}};
}

void ChainedScheduler::read(const StateDict& state) {
  check_schedule_keys(state_dict(), state, {.call = name()});
  std::vector<double> last_lr = numbers_of(state.at("_last_lr"));
  load_parts(schedulers_, state, name());
  last_lr_ = std::move(last_lr);
}

void ChainedScheduler::load_state_dict(const StateDict& state) {
  read_or_restore(
      [this](const StateDict& from) { read(from); }, state, state_dict());
}

} // namespace tessera::optim
