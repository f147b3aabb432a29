#pragma once

#include <cstdint>

#include "comm/diagnostics/call.h"
#include "comm/diagnostics/observer.h"

namespace tessera::comm {

/// A wait that observers are told of.
class WatchedWait {
 public:
  WatchedWait(uint64_t id, const Call& call, bool on_device)
      : id_(id), call_(call), on_device_(on_device) {
    tell({CallEvent::Kind::WaitStarts, id_, call_, on_device_});
  }
  ~WatchedWait() {
    tell({CallEvent::Kind::WaitEnded, id_, call_, on_device_});
  }
  WatchedWait(const WatchedWait&) = delete;
  WatchedWait& operator=(const WatchedWait&) = delete;

 private:
  const uint64_t id_;
  const Call& call_;
  const bool on_device_;
};

} // namespace tessera::comm
