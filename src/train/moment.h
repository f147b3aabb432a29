// Points in time, of the host or of a device's stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <memory>

namespace tessera::train {

/// A point in time. On a device it is the time when the stream reaches it,
/// which is known only later.
struct Moment {
  std::chrono::steady_clock::time_point host;
  std::shared_ptr<const c10::Event> device; // null if the host's time counts
};

/// A clock that starts when it is constructed, with the device idle.
class StepClock {
 public:
  /// Waits for the device, if it is not the CPU.
  explicit StepClock(c10::Device device);

  /// Now, on the host.
  Moment on_host() const;
  /// The time when this thread's current stream of the device gets here; on the
  /// CPU, now.
  Moment on_device() const;

  /// Waits until every Moment so far has been reached.
  void finish() const;
  /// Call it after finish().
  double seconds(const Moment& moment) const;

 private:
  const c10::Device device_;
  Moment start_;
};

} // namespace tessera::train
