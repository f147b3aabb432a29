// One load on one rank: what goes where, then the reading.
#pragma once

#include <tessera/checkpoint/checkpoint.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "checkpoint/disk/block_reader.h"
#include "checkpoint/disk/source.h"
#include "checkpoint/format/value.h"
#include "checkpoint/state_leaves.h"

namespace tessera::checkpoint {

class LoadJob {
 public:
  /// Compares the target with the checkpoint. Throws c10::ValueError that lists
  /// everything that does not fit.
  LoadJob(
      const Source& source,
      StateDict& target,
      const LoadOptions& options,
      int num_threads);

  /// Reads every block that read() will read, and keeps none of them. Throws
  /// FileError.
  void verify();
  /// Fills the tensors. If it throws FileError, some of them have been filled.
  void read();
  /// Replaces the values that are not tensors; once.
  void replace_values();

  LoadReport report() const {
    return report_;
  }

 private:
  /// A part of a stored box, and the part of the target it goes to.
  struct Read {
    const StoredTensor* tensor;
    const StoredBox* box;
    Place place;
    std::vector<int64_t> begin; // in the tensor
    at::Tensor to;
  };
  struct Replacement {
    StateValue* at;
    StateValue value;
  };

  void match(const std::vector<StateLeaf>& slots, const LoadOptions& options);
  void match_slot(const StateLeaf& slot, const std::string& name, bool cast);
  void match_tensor(
      const StateLeaf& slot,
      const StoredTensor& stored,
      bool cast);
  void find_unexpected(
      const std::vector<StateLeaf>& slots,
      const LoadOptions& options);
  void complain(const LoadOptions& options) const;
  void add_reads(
      const StoredTensor& stored,
      const ShardedTensor::Box& box,
      const at::Tensor& to);
  void in_threads(
      const std::function<void(const Read& read, BlockReader& reader)>& body);
  void fill(const Read& read, BlockReader& reader);

  const Source& source_;
  const int num_threads_;
  const bool verifies_;
  const Progress progress_;
  std::vector<std::string> names_; // of the slots, in the checkpoint
  std::vector<std::string> problems_;
  std::vector<Read> reads_; // by place
  std::vector<Replacement> replacements_;
  LoadReport report_;

  std::mutex mutex_;
  uint64_t total_bytes_ = 0;
  uint64_t done_bytes_ = 0;
};

} // namespace tessera::checkpoint
