// Memory by what it is used for, and its peak.
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
  Activations, // saved for backward, and temporaries
  Buffers, // kept for the next unit; buckets of ddp; buffers of the model
};
constexpr size_t kNumKinds = 6;
/// In the order in which tables show them.
constexpr std::array<Kind, kNumKinds> all_kinds() {
  return {
      Kind::Shards,
      Kind::Full,
      Kind::Gradients,
      Kind::Optimizer,
      Kind::Activations,
      Kind::Buffers};
}
/// For example "shards".
const char* name_of(Kind kind);

/// Bytes by kind.
struct Memory {
  std::array<int64_t, kNumKinds> by_kind{};

  int64_t of(Kind kind) const {
    return by_kind[static_cast<size_t>(kind)];
  }
  int64_t total() const;
};

/// What a rank holds on one device, or on the host, during its steps.
class Ledger {
 public:
  void add(Kind kind, int64_t bytes);
  void drop(Kind kind, int64_t bytes);
  /// For memory that an operator allocates and frees.
  void touch(Kind kind, int64_t bytes) {
    add(kind, bytes);
    drop(kind, bytes);
  }

  const Memory& now() const {
    return now_;
  }
  /// Memory at the moment when the total was highest, since reset_peak().
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
