#include "train/moment.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::train {

StepClock::StepClock(c10::Device device) : device_(device) {
  finish();
  start_ = on_device();
  start_.host = std::chrono::steady_clock::now();
}

Moment StepClock::on_host() const {
  return {std::chrono::steady_clock::now(), nullptr};
}

Moment StepClock::on_device() const {
  if (device_.is_cpu()) {
    return on_host();
  }
  const c10::impl::VirtualGuardImpl guard(device_.type());
  auto event = std::make_shared<c10::Event>(
      device_.type(), c10::EventFlag::BACKEND_DEFAULT); // with its time
  event->record(guard.getStream(device_));
  return {std::chrono::steady_clock::now(), std::move(event)};
}

void StepClock::finish() const {
  if (!device_.is_cpu()) {
    c10::impl::VirtualGuardImpl(device_.type())
        .synchronizeDevice(device_.index());
  }
}

double StepClock::seconds(const Moment& moment) const {
  constexpr double kMillisecond = 1e-3;
  return moment.device
      ? start_.device->elapsedTime(*moment.device) * kMillisecond
      : std::chrono::duration<double>(moment.host - start_.host).count();
}

} // namespace tessera::train
