#include "shard/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace tessera::shard {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

} // namespace

void StreamEvent::wait() {
  if (event_) {
    event_->block(current_stream(event_->device()));
    event_.reset();
  }
}

StreamEvent SideStream::Scope::record() const {
  const auto stream = guard_.current_stream();
  if (!stream) {
    return StreamEvent();
  }
  c10::Event event(stream->device_type());
  event.record(*stream);
  return StreamEvent(std::move(event));
}

SideStream::Scope SideStream::enter(c10::Device device) {
  if (device.is_cpu()) {
    return Scope();
  }
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream current = impl.getStream(device);
  auto found = streams_.find(current.device_index());
  if (found == streams_.end()) {
    found = streams_
                .emplace(
                    current.device_index(),
                    impl.getStreamFromGlobalPool(
                        current.device(), /*isHighPriority=*/true))
                .first;
  }
  c10::Event ready(device.type());
  ready.record(current);
  ready.block(found->second);
  return Scope(found->second);
}

} // namespace tessera::shard
