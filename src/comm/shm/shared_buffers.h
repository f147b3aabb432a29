// The shared allocations of one group, as this rank maps them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "base/mutex.h"
#include "comm/shm/segment.h"

namespace tessera::comm::shm {

/// Finds a buffer by its number, which all ranks use, or by an address in it.
/// Thread-safe.
class SharedBuffers : public std::enable_shared_from_this<SharedBuffers> {
 public:
  /// Keeps the mapping until dropped; may outlive the SharedBuffers.
  class Buffer {
   public:
    Buffer(std::weak_ptr<SharedBuffers> owner, uint64_t id, Segment segment);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    std::byte* data() const {
      return segment_.data();
    }

   private:
    // Constant after construction.
    const std::weak_ptr<SharedBuffers> owner_;
    const uint64_t id_;
    const Segment segment_;
  };

  struct Place {
    uint64_t id = 0;
    uint64_t offset = 0;
  };

  std::shared_ptr<Buffer> add(uint64_t id, Segment segment);

  /// The buffer that [address, address + bytes) lies in, if any.
  std::optional<Place> find(const void* address, size_t bytes) const;

  /// Throws std::runtime_error if this rank has dropped the buffer.
  const std::byte* at(uint64_t id, uint64_t offset) const;

 private:
  struct Range {
    const std::byte* begin = nullptr;
    size_t bytes = 0;
  };

  mutable Mutex mutex_;
  std::map<uint64_t, Range> by_id_ TESSERA_GUARDED_BY(mutex_);
  std::map<const std::byte*, uint64_t> by_address_ TESSERA_GUARDED_BY(mutex_);
};

} // namespace tessera::comm::shm
