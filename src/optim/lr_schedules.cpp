#include <tessera/error.h>
#include <tessera/optim/lr_schedules.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera::optim {
namespace {

void refuse_zero_iters(int64_t total_iters, const char* call) {
  if (total_iters == 0) {
    raise<c10::ValueError>(
        {.call = call},
        "total_iters is 0, so this schedule cannot follow another one. Leave it out of the sequence.");
  }
}

} // namespace

StepLR::StepLR(torch::optim::Optimizer& optimizer, StepLROptions options)
    : EpochSchedule(optimizer, "StepLR", options.last_epoch()),
      options_(options) {
  check();
  start();
}

void StepLR::check() const {
  if (options_.step_size() <= 0) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format("step_size is {}, must be above 0.", options_.step_size()));
  }
}

void StepLR::read_more(const StateDict& /*state*/) {
  check();
}

std::vector<double> StepLR::get_lr() const {
  if (last_epoch() == 0 || last_epoch() % options_.step_size() != 0) {
    return current_lrs();
  }
  return scaled_lrs(options_.gamma());
}

std::vector<double> StepLR::closed_form_lr() const {
  need_base_lrs();
  const int64_t num_cuts = last_epoch() / options_.step_size(); // whole ones
  const double factor =
      std::pow(options_.gamma(), static_cast<double>(num_cuts));
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr *= factor;
  }
  return lrs;
}

std::vector<OptionField> StepLR::fields() {
  return {{"step_size", &options_.step_size()}, {"gamma", &options_.gamma()}};
}

MultiStepLR::MultiStepLR(
    torch::optim::Optimizer& optimizer,
    MultiStepLROptions options)
    : EpochSchedule(optimizer, "MultiStepLR", options.last_epoch()),
      options_(std::move(options)) {
  for (const int64_t milestone : options_.milestones()) {
    ++milestones_[milestone];
  }
  start();
}

std::vector<double> MultiStepLR::get_lr() const {
  const auto found = milestones_.find(last_epoch());
  return found == milestones_.end()
      ? current_lrs()
      : scaled_lrs(
            std::pow(options_.gamma(), static_cast<double>(found->second)));
}

std::vector<double> MultiStepLR::closed_form_lr() const {
  need_base_lrs();
  int64_t passed = 0;
  for (const auto& [milestone, count] : milestones_) {
    passed += milestone <= last_epoch() ? count : 0;
  }
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr *= std::pow(options_.gamma(), static_cast<double>(passed));
  }
  return lrs;
}

std::vector<OptionField> MultiStepLR::fields() {
  return {{"gamma", &options_.gamma()}};
}

void MultiStepLR::write_more(StateDict& state) const {
  StateDict milestones;
  for (const auto& [milestone, count] : milestones_) {
    milestones.set(milestone, count);
  }
  state.set("milestones", std::move(milestones));
}

void MultiStepLR::read_more(const StateDict& state) {
  std::map<int64_t, int64_t> milestones;
  for (const auto& [milestone, count] : state.at("milestones").dict()) {
    milestones[milestone.id()] = count.to_int();
  }
  milestones_ = std::move(milestones);
}

ConstantLR::ConstantLR(
    torch::optim::Optimizer& optimizer,
    ConstantLROptions options)
    : EpochSchedule(optimizer, "ConstantLR", options.last_epoch()),
      options_(options) {
  if (!(options_.factor() >= 0 && options_.factor() <= 1)) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format("factor is {}, must be from 0 to 1.", options_.factor()));
  }
  start();
}

std::vector<double> ConstantLR::get_lr() const {
  if (last_epoch() == 0) {
    return scaled_lrs(options_.factor());
  }
  if (last_epoch() != options_.total_iters()) {
    return current_lrs();
  }
  return scaled_lrs(1.0 / options_.factor());
}

std::vector<double> ConstantLR::closed_form_lr() const {
  need_base_lrs();
  const double is_over = last_epoch() >= options_.total_iters() ? 1 : 0;
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr *= options_.factor() + is_over * (1 - options_.factor());
  }
  return lrs;
}

std::vector<OptionField> ConstantLR::fields() {
  return {
      {"factor", &options_.factor()}, {"total_iters", &options_.total_iters()}};
}

LinearLR::LinearLR(torch::optim::Optimizer& optimizer, LinearLROptions options)
    : EpochSchedule(optimizer, "LinearLR", options.last_epoch()),
      options_(options) {
  if (!(options_.start_factor() > 0 && options_.start_factor() <= 1)) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format(
            "start_factor is {}, must be above 0 and 1 at most.",
            options_.start_factor()));
  }
  if (!(options_.end_factor() >= 0 && options_.end_factor() <= 1)) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format(
            "end_factor is {}, must be from 0 to 1.", options_.end_factor()));
  }
  start();
}

std::vector<double> LinearLR::get_lr() const {
  const double first = options_.start_factor();
  const double last = options_.end_factor();
  const auto total = static_cast<double>(options_.total_iters());
  if (last_epoch() == 0) {
    return scaled_lrs(first);
  }
  if (is_initial() || last_epoch() > options_.total_iters()) {
    return current_lrs();
  }
  const auto before = static_cast<double>(last_epoch() - 1);
  return scaled_lrs(
      1.0 + (last - first) / (total * first + before * (last - first)));
}

std::vector<double> LinearLR::closed_form_lr() const {
  need_base_lrs();
  refuse_zero_iters(options_.total_iters(), "LinearLR");
  const double first = options_.start_factor();
  const double last = options_.end_factor();
  const auto total = static_cast<double>(options_.total_iters());
  const auto now =
      static_cast<double>(std::min(options_.total_iters(), last_epoch()));
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr *= first + (last - first) * now / total;
  }
  return lrs;
}

std::vector<OptionField> LinearLR::fields() {
  return {
      {"start_factor", &options_.start_factor()},
      {"end_factor", &options_.end_factor()},
      {"total_iters", &options_.total_iters()}};
}

ExponentialLR::ExponentialLR(
    torch::optim::Optimizer& optimizer,
    ExponentialLROptions options)
    : EpochSchedule(optimizer, "ExponentialLR", options.last_epoch()),
      options_(options) {
  start();
}

std::vector<double> ExponentialLR::get_lr() const {
  return is_initial() ? current_lrs() : scaled_lrs(options_.gamma());
}

std::vector<double> ExponentialLR::closed_form_lr() const {
  need_base_lrs();
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr *= std::pow(options_.gamma(), static_cast<double>(last_epoch()));
  }
  return lrs;
}

std::vector<OptionField> ExponentialLR::fields() {
  return {{"gamma", &options_.gamma()}};
}

PolynomialLR::PolynomialLR(
    torch::optim::Optimizer& optimizer,
    PolynomialLROptions options)
    : EpochSchedule(optimizer, "PolynomialLR", options.last_epoch()),
      options_(options) {
  start();
}

std::vector<double> PolynomialLR::get_lr() const {
  if (is_initial() || last_epoch() > options_.total_iters()) {
    return current_lrs();
  }
  const auto total = static_cast<double>(options_.total_iters());
  const auto now = static_cast<double>(last_epoch());
  return scaled_lrs(std::pow(
      (1.0 - now / total) / (1.0 - (now - 1) / total), options_.power()));
}

std::vector<double> PolynomialLR::closed_form_lr() const {
  need_base_lrs();
  refuse_zero_iters(options_.total_iters(), "PolynomialLR");
  const auto total = static_cast<double>(options_.total_iters());
  const auto now =
      static_cast<double>(std::min(options_.total_iters(), last_epoch()));
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr *= std::pow(1.0 - now / total, options_.power());
  }
  return lrs;
}

std::vector<OptionField> PolynomialLR::fields() {
  return {
      {"total_iters", &options_.total_iters()}, {"power", &options_.power()}};
}

} // namespace tessera::optim
