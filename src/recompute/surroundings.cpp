#include "recompute/surroundings.h"

#include <tessera/error.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <mutex>

namespace tessera::recomputation {

std::vector<at::Device> random_devices(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Device> devices{at::kCPU};
  const auto type = at::getAccelerator();
  if (!type) {
    return devices;
  }
  const auto add = [&](at::Device device) {
    if (device.type() == *type &&
        std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  };
  // Includes the current device if it is in use: inputs may be moved there.
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  if (hooks.isAvailable() &&
      hooks.hasPrimaryContext(hooks.getCurrentDevice())) {
    add(at::Device(*type, hooks.getCurrentDevice()));
  }
  for (const at::Tensor& input : inputs) {
    if (input.defined()) {
      add(input.device());
    }
  }
  return devices;
}

RngState RngState::current(at::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return {device, generator.get_state()};
}

void RngState::restore() const {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

AutocastState AutocastState::current() {
  AutocastState state;
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    state.types_.push_back(
        {type,
         at::autocast::is_autocast_enabled(type),
         at::autocast::get_autocast_dtype(type)});
  }
  state.caches_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::restore() const {
  for (const auto& [type, enabled, dtype] : types_) {
    at::autocast::set_autocast_enabled(type, enabled);
    at::autocast::set_autocast_dtype(type, dtype);
  }
  at::autocast::set_autocast_cache_enabled(caches_);
}

bool AutocastState::is_on() const {
  return std::any_of(types_.begin(), types_.end(), [](const auto& type) {
    return type.enabled;
  });
}

Surroundings Surroundings::current(const std::vector<at::Device>& devices) {
  Surroundings now;
  for (const at::Device& device : devices) {
    now.random_.push_back(RngState::current(device));
  }
  now.autocast_ = AutocastState::current();
  return now;
}

std::vector<at::Device> Surroundings::devices() const {
  std::vector<at::Device> result;
  for (const RngState& state : random_) {
    result.push_back(state.device);
  }
  return result;
}

void Surroundings::restore() const {
  for (const RngState& state : random_) {
    state.restore();
  }
  autocast_.restore();
}

RecordedDraws::RecordedDraws(std::vector<at::Device>& devices) {
  for (const at::Device& device : devices) {
    recording_ =
        recording_ == nullptr ? libtorch::recording_on(device) : recording_;
  }
  if (recording_ != nullptr) {
    std::erase(devices, recording_->device());
    before_ = recording_->random_position();
  }
}

void RecordedDraws::check() const {
  if (recording_ != nullptr && recording_->random_position() != before_) {
    raise(
        {.call = "recompute"},
        "this recomputed function draws random numbers (dropout?), and in a captured step its second run would draw different ones. Recompute only functions that draw none, or capture without recomputation.");
  }
}

void OwnCasts::clear() const {
  if (is_on_) {
    at::autocast::clear_cache();
  }
}

} // namespace tessera::recomputation
