// Work on a device that runs beside the model's own.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <map>
#include <optional>

namespace tessera::shard {

/// The end of some work. Waiting makes the current stream wait, not the host;
/// with no work, or on the CPU, it does nothing.
class StreamEvent {
 public:
  StreamEvent() = default;
  explicit StreamEvent(c10::Event event) : event_(std::move(event)) {}

  /// Further calls do nothing.
  void wait();

 private:
  std::optional<c10::Event> event_;
};

/// [Note: side streams]
///
/// Copies between shards and full buffers want bandwidth, layers want
/// arithmetic: on a GPU they run beside one another. A scope of a side stream
/// begins after everything that the current stream has queued so far; whoever
/// wants its results waits for the event that it records.
///
/// Memory stays safe without record_stream(): what a scope uses is held until
/// the current stream has waited for its event. A buffer from the current
/// stream's pool is thus given back after that; one from the side stream's own
/// pool is reused only in a later scope, which begins after what the current
/// stream did with it.
///
/// On the CPU all of this does nothing.
class SideStream {
 public:
  class Scope {
   public:
    Scope() = default;
    explicit Scope(const c10::Stream& stream) : guard_(stream) {}

    /// The end of what was queued in this scope.
    StreamEvent record() const;

   private:
    c10::OptionalStreamGuard guard_;
  };

  Scope enter(c10::Device device);

 private:
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

} // namespace tessera::shard
