// What a rank sends in a step, by operation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::plan {

enum class Operation {
  GatherForward, // all-gathers of full parameters, in forward
  GatherBackward,
  ReduceScatter, // of gradients, or a sum of whole ones if rows are few
  AllReduce, // of gradients: over the copies, or of ddp's buckets
  SendParams, // zero: owners send what they stepped
  Agreement, // ranks check that they did the same: a few bytes per backward
};
constexpr size_t kNumOperations = 6;
/// In the order in which tables show them.
constexpr std::array<Operation, kNumOperations> all_operations() {
  return {
      Operation::GatherForward,
      Operation::GatherBackward,
      Operation::ReduceScatter,
      Operation::AllReduce,
      Operation::SendParams,
      Operation::Agreement};
}
/// For example "all-gather, forward".
const char* name_of(Operation operation);
/// The key in JSON, for example "all_gather_forward".
const char* key_of(Operation operation);

struct Traffic {
  int64_t collectives = 0;
  /// The size of the whole tensors that are gathered or reduced, with padding.
  int64_t tensor_bytes = 0;
  /// What each rank sends, and receives: see comm::sent_of(). Twice that where
  /// every rank gets a sum.
  int64_t sent_bytes = 0;
};

class Wire {
 public:
  /// Counts tensors that are exchanged by `ranks` ranks in that many
  /// collectives; nothing if there is one rank. Returns what each rank sends.
  int64_t count(
      Operation operation,
      int64_t tensor_bytes,
      int64_t ranks,
      int64_t collectives = 1);
  /// The same for one collective that gives every rank the sum.
  int64_t count_sum(Operation operation, int64_t tensor_bytes, int64_t ranks);
  /// Everything counted from now on counts `repeats` times.
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
  void add(
      Operation operation,
      int64_t collectives,
      int64_t tensor_bytes,
      int64_t sent_bytes);

  int64_t repeats_ = 1;
  std::array<Traffic, kNumOperations> traffic_{};
};

} // namespace tessera::plan
