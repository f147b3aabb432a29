#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace tessera::checkpoint {

/// Reports how many bytes are done, and of how many, to whoever shows it.
class ProgressMeter {
 public:
  using Show = std::function<void(uint64_t done, uint64_t total)>;

  ProgressMeter() = default;
  explicit ProgressMeter(Show show) : show_(std::move(show)) {}

  void begin(uint64_t total) {
    total_ = total;
    done_ = 0;
    add(0);
  }
  void add(uint64_t bytes) {
    done_ += bytes;
    if (show_) {
      show_(done_, total_);
    }
  }

 private:
  Show show_;
  uint64_t total_ = 0;
  uint64_t done_ = 0;
};

} // namespace tessera::checkpoint
