// Buffers that wait for the next unit, by size. Knows no LibTorch: BufferPool
// and `tessera plan` share this policy.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace tessera::engine {

/// How many idle buffers of one size are kept.
struct IdleLimits {
  /// The unit in use, the unit gathered ahead, and one to spare.
  static constexpr size_t kDuringStep = 3;
  /// What a forward needs: the touched unit's and the next.
  static constexpr size_t kBetweenSteps = 2;
};

template <class Buffer>
class IdleBuffers {
 public:
  /// A buffer of exactly this size, or nothing if none is idle.
  std::optional<Buffer> take(size_t bytes) {
    const auto found = by_size_.find(bytes);
    if (found == by_size_.end() || found->second.empty()) {
      return std::nullopt;
    }
    Buffer buffer = std::move(found->second.back());
    found->second.pop_back();
    return buffer;
  }

  /// Keeps the buffer, or destroys it if enough of its size are idle. Returns
  /// whether the buffer was kept.
  bool give(size_t bytes, Buffer buffer) {
    auto& idle = by_size_[bytes];
    if (idle.size() >= IdleLimits::kDuringStep) {
      return false;
    }
    idle.push_back(std::move(buffer));
    return true;
  }

  /// Keeps at most `count` buffers of each size.
  void trim(size_t count) {
    for (auto& [bytes, idle] : by_size_) {
      while (idle.size() > count) {
        idle.pop_back();
      }
    }
  }

  /// Calls `see(buffer, bytes)` for each idle buffer.
  template <class See>
  void for_each(const See& see) const {
    for (const auto& [bytes, idle] : by_size_) {
      for (const Buffer& buffer : idle) {
        see(buffer, bytes);
      }
    }
  }

 private:
  std::map<size_t, std::vector<Buffer>> by_size_;
};

} // namespace tessera::engine
