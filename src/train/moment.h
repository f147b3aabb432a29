// Points in time, of the host or of a device's stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <memory>

namespace tessera::train {

/// A point in time. On a device it is when the stream comes to it, which is
/// known only later.
struct Moment {
  std::chrono::steady_clock::time_point host;
  std::shared_ptr<const c10::Event> device; // null: the host's time counts
};

/// A clock that starts when it is made, with the device idle.
class StepClock {
 public:
  /// Waits for the device, if it is not the CPU.
  explicit StepClock(c10::Device device);

  /// Now, on the host.
  Moment on_host() const;
  /// When the device's current stream of this thread comes here; on the CPU,
  /// now.
  Moment on_device() const;

  /// Waits until every Moment so far has come.
  void finish() const;
  /// After finish().
  double seconds(const Moment& moment) const;

 private:
  const c10::Device device_;
  Moment start_;
};

} // namespace tessera::train
