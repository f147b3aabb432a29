#include <tessera/error.h>
#include <tessera/optim/cosine_lr.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cmath>
#include <numbers>
#include <utility>

#include "optim/schedule_dictionary.h"

namespace tessera::optim {
namespace {

constexpr double kPi = std::numbers::pi;

void need_positive(int64_t value, const char* key, const std::string& call) {
  if (value <= 0) {
    raise<c10::ValueError>(
        {.call = call}, fmt::format("{} is {}, must be above 0.", key, value));
  }
}

} // namespace

CosineAnnealingLR::CosineAnnealingLR(
    torch::optim::Optimizer& optimizer,
    CosineAnnealingLROptions options)
    : EpochSchedule(optimizer, "CosineAnnealingLR", options.last_epoch()),
      options_(options) {
  need_positive(options_.T_max(), "T_max", name());
  start();
}

std::vector<double> CosineAnnealingLR::get_lr() const {
  std::vector<double> lrs = current_lrs();
  if (is_initial()) {
    return lrs;
  }
  const auto length = static_cast<double>(options_.T_max());
  const auto epoch = static_cast<double>(last_epoch());
  const double lowest = options_.eta_min();
  if ((last_epoch() - 1 - options_.T_max()) % (2 * options_.T_max()) == 0) {
    // The learning rate was at its lowest: a product would keep it there.
    need_base_lrs();
    for (size_t group = 0; group < lrs.size(); ++group) {
      lrs[group] +=
          (base_lrs()[group] - lowest) * (1 - std::cos(kPi / length)) / 2;
    }
    return lrs;
  }
  for (double& lr : lrs) {
    lr = (1 + std::cos(kPi * epoch / length)) /
            (1 + std::cos(kPi * (epoch - 1) / length)) * (lr - lowest) +
        lowest;
  }
  return lrs;
}

std::vector<double> CosineAnnealingLR::closed_form_lr() const {
  need_base_lrs();
  const auto length = static_cast<double>(options_.T_max());
  const auto epoch = static_cast<double>(last_epoch());
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr = options_.eta_min() +
        (lr - options_.eta_min()) * (1 + std::cos(kPi * epoch / length)) / 2;
  }
  return lrs;
}

std::vector<OptionField> CosineAnnealingLR::fields() {
  return {{"T_max", &options_.T_max()}, {"eta_min", &options_.eta_min()}};
}

void CosineAnnealingLR::read_more(const StateDict& /*state*/) {
  need_positive(options_.T_max(), "T_max", name());
}

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(
    torch::optim::Optimizer& optimizer,
    CosineAnnealingWarmRestartsOptions options)
    : EpochSchedule(
          optimizer,
          "CosineAnnealingWarmRestarts",
          options.last_epoch()),
      options_(options) {
  need_positive(options_.T_0(), "T_0", name());
  need_positive(options_.T_mult(), "T_mult", name());
  place_ = {static_cast<double>(options_.last_epoch()), options_.T_0()};
  start();
}

std::vector<double> CosineAnnealingWarmRestarts::get_lr() const {
  need_base_lrs();
  const auto length = static_cast<double>(place_.T_i);
  std::vector<double> lrs = base_lrs();
  for (double& lr : lrs) {
    lr = options_.eta_min() +
        (lr - options_.eta_min()) *
            (1 + std::cos(kPi * place_.T_cur / length)) / 2;
  }
  return lrs;
}

void CosineAnnealingWarmRestarts::step() {
  if (last_epoch() < 0) {
    step(0.0);
    return;
  }
  Place next = place_;
  next.T_cur += 1;
  const auto length = static_cast<double>(next.T_i);
  if (next.T_cur >= length) {
    next.T_cur = std::fmod(next.T_cur, length);
    next.T_i *= options_.T_mult();
  }
  go_to(last_epoch() + 1, next);
}

void CosineAnnealingWarmRestarts::step(double epoch) {
  if (!(epoch >= 0)) {
    raise<c10::ValueError>(
        {.call = name()},
        fmt::format("the epoch is {}, must be 0 or more.", epoch));
  }
  const auto first = static_cast<double>(options_.T_0());
  const auto growth = static_cast<double>(options_.T_mult());
  Place next = place_;
  if (epoch < first) {
    next = {epoch, options_.T_0()};
  } else if (options_.T_mult() == 1) {
    next.T_cur = std::fmod(epoch, first);
  } else {
    const auto round = static_cast<int64_t>(
        std::log(epoch / first * (growth - 1) + 1) / std::log(growth));
    int64_t times = 1; // as long as the first round
    for (int64_t i = 0; i < round; ++i) {
      times *= options_.T_mult();
    }
    next.T_i = options_.T_0() * times;
    next.T_cur = epoch -
        static_cast<double>(options_.T_0() * (times - 1)) / (growth - 1);
  }
  go_to(static_cast<int64_t>(std::floor(epoch)), next);
}

void CosineAnnealingWarmRestarts::go_to(int64_t epoch, Place place) {
  const Place before = std::exchange(place_, place);
  try {
    move_to(epoch, Form::Recursive);
  } catch (...) {
    place_ = before;
    throw;
  }
}

std::vector<OptionField> CosineAnnealingWarmRestarts::fields() {
  return {
      {"T_0", &options_.T_0()},
      {"T_i", &place_.T_i},
      {"T_mult", &options_.T_mult()},
      {"eta_min", &options_.eta_min()}};
}

void CosineAnnealingWarmRestarts::write_more(StateDict& state) const {
  // Python has an int unless the epoch was given as a float.
  const auto whole = static_cast<int64_t>(place_.T_cur);
  state.set(
      "T_cur",
      static_cast<double>(whole) == place_.T_cur ? StateValue(whole)
                                                 : StateValue(place_.T_cur));
}

void CosineAnnealingWarmRestarts::read_more(const StateDict& state) {
  need_positive(options_.T_0(), "T_0", name());
  need_positive(options_.T_mult(), "T_mult", name());
  need_positive(place_.T_i, "T_i", name());
  place_.T_cur = number_of(state.at("T_cur"));
}

} // namespace tessera::optim
