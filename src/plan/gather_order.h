// Which unit is gathered ahead and which units make room for it: the decisions
// of engine::Schedule, written again here because they are not LibTorch-free
// there.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

namespace tessera::plan {

class GatherOrder {
 public:
  struct Options {
    size_t root = 0; // stays full until the end of backward
    bool reshards_after_forward = true;
    bool gathers_ahead = true;
  };
  explicit GatherOrder(Options options) : options_(options) {}

  void begin_forward();
  void begin_backward() {
    in_backward_ = true;
  }
  bool in_backward() const {
    return in_backward_;
  }

  /// A gather of the unit was started.
  void add_full(size_t unit) {
    full_.push_back(unit);
  }
  /// The unit was resharded.
  void remove_full(size_t unit);
  /// Units that are full or being gathered, the oldest first.
  const std::vector<size_t>& full() const {
    return full_;
  }

  /// Units to reshard before `unit` is read.
  std::vector<size_t> to_reshard_before(
      size_t unit,
      const std::function<bool(size_t)>& is_gathering) const;
  /// Notes that `unit` was gathered. Returns the unit whose gather followed
  /// this one in the last iteration, if that is to start now.
  std::optional<size_t> next_after(size_t unit);

 private:
  const Options options_;
  std::vector<size_t> full_;
  std::vector<size_t> last_gathers_; // in the last iteration
  std::vector<size_t> gathers_; // in this one
  bool in_backward_ = false;
};

} // namespace tessera::plan
