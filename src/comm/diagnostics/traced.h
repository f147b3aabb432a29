// Ranges that LibTorch's profiler shows by name.
#pragma once

#include <ATen/record_function.h>

#include <string>

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

} // namespace tessera::comm
