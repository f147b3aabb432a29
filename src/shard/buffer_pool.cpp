#include "shard/buffer_pool.h"

#include <utility>

namespace tessera::shard {
namespace {

/// Of one size: the unit in use, the one gathered ahead, and one to spare.
constexpr size_t kMaxIdle = 3;

} // namespace

c10::DataPtr BufferPool::take(
    size_t bytes,
    c10::Device device,
    c10::Allocator& allocator) {
  if (device.is_cpu()) {
    auto found = idle_.find(bytes);
    if (found != idle_.end() && !found->second.empty()) {
      c10::DataPtr data = std::move(found->second.back());
      found->second.pop_back();
      idle_bytes_ -= bytes;
      return data;
    }
  }
  return allocator.allocate(bytes);
}

void BufferPool::give(c10::DataPtr data, size_t bytes) {
  if (!data.device().is_cpu()) {
    return;
  }
  auto& idle = idle_[bytes];
  if (idle.size() < kMaxIdle) {
    idle.push_back(std::move(data));
    idle_bytes_ += bytes;
  }
}

void BufferPool::clear() {
  idle_.clear();
  idle_bytes_ = 0;
}

} // namespace tessera::shard
