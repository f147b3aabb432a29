// What a rank sends in a step, by operation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::plan {

enum class Operation {
  GatherForward, // all-gathers of full parameters, in forward
  GatherBackward,
  ReduceScatter, // of gradients
  AllReduce, // of gradients: over the copies, or of ddp's buckets
  SendParams, // zero: owners send what they stepped
  Agreement, // that ranks did the same: a few bytes a backward
};
constexpr size_t kNumOperations = 6;
/// "all-gather, forward".
const char* name_of(Operation operation);
/// "all_gather_forward", for JSON.
const char* key_of(Operation operation);

struct Traffic {
  int64_t collectives = 0;
  /// Of the whole tensors that are gathered or reduced, padding included.
  int64_t tensor_bytes = 0;
  /// That each rank sends, and receives, in an algorithm that sends no byte
  /// twice, such as a ring: (n - 1) / n of the tensors, and twice that in an
  /// all-reduce.
  int64_t sent_bytes = 0;
};

class Wire {
 public:
  /// Tensors that go over `ranks` ranks in so many collectives; nothing where
  /// there is one rank.
  void count(
      Operation operation,
      int64_t tensor_bytes,
      int64_t ranks,
      int64_t collectives = 1);
  /// What is counted from now on happens so often.
  void set_repeats(int64_t repeats) {
    repeats_ = repeats;
  }
  void reset() {
    traffic_ = {};
  }
  const Traffic& of(Operation operation) const {
    return traffic_[static_cast<size_t>(operation)];
  }
  Traffic total() const;

 private:
  int64_t repeats_ = 1;
  std::array<Traffic, kNumOperations> traffic_{};
};

} // namespace tessera::plan
