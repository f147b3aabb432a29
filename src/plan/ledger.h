// Memory by what it is for, and the most there was of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::plan {

enum class Kind {
  Shards, // this rank's part of the parameters; all of them in ddp and zero
  Full, // gathered parameters
  Gradients, // full ones on their way, and those of the shards
  Optimizer, // its state
  Activations, // what backward needs, and what comes and goes on the way
  Buffers, // kept for the next unit; buckets of ddp; buffers of the model
};
constexpr size_t kNumKinds = 6;
/// "shards".
const char* name_of(Kind kind);

/// Bytes by kind.
struct Memory {
  std::array<int64_t, kNumKinds> by_kind{};

  int64_t of(Kind kind) const {
    return by_kind[static_cast<size_t>(kind)];
  }
  int64_t total() const;
};

/// What a rank holds in one place while its steps are walked through.
class Ledger {
 public:
  void add(Kind kind, int64_t bytes);
  void drop(Kind kind, int64_t bytes);
  /// For what an operator has for itself alone.
  void touch(Kind kind, int64_t bytes) {
    add(kind, bytes);
    drop(kind, bytes);
  }

  const Memory& now() const {
    return now_;
  }
  /// Of the moment when the total was the highest, since reset_peak().
  const Memory& peak() const {
    return peak_;
  }
  /// The most of each kind, each at its own moment.
  const Memory& highest() const {
    return highest_;
  }
  void reset_peak();

 private:
  int64_t total_ = 0;
  int64_t peak_total_ = 0;
  Memory now_;
  Memory peak_;
  Memory highest_;
};

} // namespace tessera::plan
