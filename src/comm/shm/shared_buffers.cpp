#include "comm/shm/shared_buffers.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace tessera::comm::shm {

SharedBuffers::Buffer::Buffer(
    std::weak_ptr<SharedBuffers> owner,
    uint64_t id,
    Segment segment)
    : owner_(std::move(owner)), id_(id), segment_(std::move(segment)) {}

SharedBuffers::Buffer::~Buffer() {
  if (auto owner = owner_.lock()) {
    const MutexLock lock(owner->mutex_);
    owner->by_id_.erase(id_);
    owner->by_address_.erase(segment_.data());
  }
}

std::shared_ptr<SharedBuffers::Buffer> SharedBuffers::add(
    uint64_t id,
    Segment segment) {
  {
    const MutexLock lock(mutex_);
    by_id_[id] = {segment.data(), segment.bytes()};
    by_address_[segment.data()] = id;
  }
  return std::make_shared<Buffer>(weak_from_this(), id, std::move(segment));
}

std::optional<SharedBuffers::Place> SharedBuffers::find(
    const void* address,
    size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(address);
  const MutexLock lock(mutex_);
  auto after = by_address_.upper_bound(begin);
  if (after == by_address_.begin()) {
    return std::nullopt;
  }
  const uint64_t id = std::prev(after)->second;
  const Range& range = by_id_.at(id);
  const auto offset = static_cast<size_t>(begin - range.begin);
  if (offset + bytes > range.bytes) {
    return std::nullopt;
  }
  return Place{id, offset};
}

const std::byte* SharedBuffers::at(uint64_t id, uint64_t offset) const {
  const MutexLock lock(mutex_);
  auto entry = by_id_.find(id);
  if (entry == by_id_.end()) {
    throw std::runtime_error(
        "a peer passed shared buffer #" + std::to_string(id) +
        ", which this rank has dropped. Keep the tensor of allocate_shared() on every rank while any rank uses it.");
  }
  return entry->second.begin + offset;
}

} // namespace tessera::comm::shm
