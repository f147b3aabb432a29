// Reads and writes the dictionaries of schedules.
#pragma once

#include <tessera/error.h>
#include <tessera/state/state_dict.h>

#include <vector>

namespace tessera::optim {

/// A number, or a tensor with one element: Python's learning rates may be
/// tensors. Throws c10::TypeError.
double number_of(const StateValue& value);
std::vector<double> numbers_of(const StateValue& list);
StateList list_of(const std::vector<double>& numbers);

/// Throws c10::ValueError unless `given` has the keys of `own`, which is the
/// schedule's own dictionary. Keys that Python's classes have for their own use
/// may be missing.
void check_schedule_keys(
    const StateDict& own,
    const StateDict& given,
    const ErrorSite& site);

/// Calls `read(given)`; if that throws, calls `read(before)` and throws on, so
/// that nothing is half changed.
template <class Read>
void read_or_restore(
    const Read& read,
    const StateDict& given,
    const StateDict& before) {
  try {
    read(given);
  } catch (...) {
    read(before);
    throw;
  }
}

} // namespace tessera::optim
