#include "optim/schedule_dictionary.h"

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace tessera::optim {
namespace {

/// Flags that are only set inside a call of Python's step(), and one that
/// earlier versions have.
bool is_pythons_own(const StateKey& key) {
  static constexpr std::array kKeys{
      "_get_lr_called_within_step", "_is_initial", "verbose"};
  return std::any_of(kKeys.begin(), kKeys.end(), [&](const char* known) {
    return key == StateKey(known);
  });
}

} // namespace

double number_of(const StateValue& value) {
  return value.is_tensor() && value.tensor().numel() == 1
      ? value.tensor().item<double>()
      : value.to_double();
}

std::vector<double> numbers_of(const StateValue& list) {
  std::vector<double> numbers;
  for (const StateValue& value : list.list()) {
    numbers.push_back(number_of(value));
  }
  return numbers;
}

StateList list_of(const std::vector<double>& numbers) {
  return {numbers.begin(), numbers.end()};
}

void check_schedule_keys(
    const StateDict& own,
    const StateDict& given,
    const ErrorSite& site) {
  for (const auto& [key, value] : own) {
    if (!given.contains(key) && !is_pythons_own(key)) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "the dictionary has no \"{}\". Pass what state_dict() of a schedule of this class returned.",
              key.text()));
    }
  }
  for (const auto& [key, value] : given) {
    if (!own.contains(key) && !is_pythons_own(key)) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "the dictionary has the key \"{}\", which this schedule does not have. Pass what state_dict() of a schedule of this class returned.",
              key.text()));
    }
  }
}

} // namespace tessera::optim
