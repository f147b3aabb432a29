// The call that a thread is in, readable from a signal handler on the thread.
#pragma once

#include <cstddef>

#include "comm/diagnostics/call.h"

namespace tessera::comm {

/// Notes that a collective begins or has ended. Cheap: on every path.
void note_call_begins(const Call& call, const char* group);
void note_call_ends();

/// Writes one line such as `in all_gather_into of Float [8] (32 bytes), call
/// #3, group "world", since 2.4 s` or `in no collective; the last was ...`
/// into `text`; returns its length. Async-signal-safe.
size_t describe_current_call(char* text, size_t capacity);

} // namespace tessera::comm
