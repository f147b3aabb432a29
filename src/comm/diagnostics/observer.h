// Tells observers of collectives as they happen, for timelines.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/diagnostics/call.h"

namespace tessera::comm {

struct CallEvent {
  enum class Kind {
    Starts, // on the thread that makes the call
    Ended, // on whatever thread saw to it, also if it failed
    WaitStarts, // on the thread that has to wait
    WaitEnded,
  };
  Kind kind;
  /// Tells the calls of a process apart, over all groups.
  uint64_t id;
  const Call& call;
  /// The call runs on a device: Ended comes at once, on a stream that the
  /// device reaches when the call has ended, and waits are those of the current
  /// stream.
  bool on_device = false;
};

/// Called in the middle of communication, by several threads, one at a time: be
/// brief and make no calls.
using CallObserver = std::function<void(const CallEvent&)>;

/// Tells `observer` of every call that this process starts, as long as the
/// watch lives. Once the watch is destroyed no thread is inside the observer.
class [[nodiscard]] CallWatch {
 public:
  explicit CallWatch(CallObserver observer);
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;
  CallWatch& operator=(const CallWatch&) = delete;

 private:
  const std::shared_ptr<const CallObserver> observer_;
};

/// An id for a call that observers are told of; 0 if nobody watches.
uint64_t next_watched_call();
/// Does nothing for a call of id 0.
void tell(const CallEvent& event);

/// "gather", "reduce", "broadcast", "scatter", "send", "receive", "exchange" or
/// "barrier".
const char* verb_of(const Call& call);
/// What a call is for: a unit's name (without the number that labels have),
/// else the label, else the operation.
std::string subject_of(const Call& call);

} // namespace tessera::comm
