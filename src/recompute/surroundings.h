// What a run depends on besides its inputs: random numbers and autocast.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "libtorch/recording.h"

namespace tessera::recomputation {

/// Devices whose random numbers a function of these inputs may draw.
std::vector<at::Device> random_devices(const std::vector<at::Tensor>& inputs);

/// The state of a device's default generator.
struct RngState {
  at::Device device;
  at::Tensor state;

  static RngState current(at::Device device);
  void restore() const;
};

/// The thread's autocast settings of all device types.
class AutocastState {
 public:
  static AutocastState current();
  void restore() const;
  bool is_on() const;

 private:
  struct Type {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<Type> types_;
  bool caches_ = true;
};

class Surroundings {
 public:
  /// With the generators of `devices`.
  static Surroundings current(const std::vector<at::Device>& devices);
  std::vector<at::Device> devices() const;
  void restore() const;

 private:
  std::vector<RngState> random_;
  AutocastState autocast_;
};

/// A generator that is recorded (CapturedStep) cannot be set back for a second
/// run, so the first one must not draw from it.
class RecordedDraws {
 public:
  /// Takes the device that is recorded out of `devices`.
  explicit RecordedDraws(std::vector<at::Device>& devices);
  /// The first run is over. Throws c10::Error if it drew.
  void check() const;

 private:
  const libtorch::Recording* recording_ = nullptr; // of one of the devices
  uint64_t before_ = 0;
};

/// Restores the state of an earlier run for a second one.
class SurroundingsGuard {
 public:
  explicit SurroundingsGuard(const Surroundings& then)
      : now_(Surroundings::current(then.devices())) {
    then.restore();
  }
  ~SurroundingsGuard() {
    now_.restore();
  }
  SurroundingsGuard(const SurroundingsGuard&) = delete;
  SurroundingsGuard& operator=(const SurroundingsGuard&) = delete;

 private:
  const Surroundings now_;
};

/// Autocast caches the casts of weights together with their graph. A cached
/// cast from outside a run would tie the run to another graph, so each run
/// casts anew.
class OwnCasts {
 public:
  OwnCasts() {
    clear();
  }
  ~OwnCasts() {
    clear();
  }
  OwnCasts(const OwnCasts&) = delete;
  OwnCasts& operator=(const OwnCasts&) = delete;

 private:
  void clear() const;

  const bool is_on_ = AutocastState::current().is_on();
};

} // namespace tessera::recomputation
