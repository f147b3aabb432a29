// Ranges that LibTorch's profiler shows by name.
#pragma once

#include <ATen/record_function.h>

#include <functional>
#include <string>
#include <utility>

#include "comm/diagnostics/call.h"
#include "comm/diagnostics/observer.h"

namespace tessera::comm {

/// "gather blocks.3": the name of a call in a trace.
inline std::string trace_name(const Call& call) {
  return std::string(verb_of(call)) + ' ' + subject_of(call);
}

/// A range on this thread while the object lives. Without a profiler `name` is
/// not called.
class TracedRange {
 public:
  template <class Name>
  explicit TracedRange(const Name& name) : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) {
      range_.before(std::string(name()));
    }
  }

 private:
  at::RecordFunction range_;
};

/// `operation` in the range of its call, on the thread that will run it.
inline std::function<void()> traced(
    const Call& call,
    std::function<void()> operation) {
  if (!at::hasCallbacks()) { // no profiler
    return operation;
  }
  return [operation = std::move(operation), name = trace_name(call)] {
    const TracedRange range([&] { return name; });
    operation();
  };
}

} // namespace tessera::comm
