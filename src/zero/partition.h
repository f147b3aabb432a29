// Which rank steps which parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::zero {

/// Parameters of all groups by their owners. A group's parameters are sorted by
/// size, the largest first and equal ones in their order; each goes to the rank
/// that has the fewest elements so far, the lowest of these. Elements of
/// earlier groups count, and their parameters stay where they are, so the
/// result depends on sizes and order alone.
class Partition {
 public:
  explicit Partition(int num_ranks)
      : by_rank_(num_ranks), owned_(num_ranks), num_elements_(num_ranks, 0) {}

  void add_group(const std::vector<at::Tensor>& params);

  /// What `rank` owns of a group, the largest first; may be empty.
  const std::vector<at::Tensor>& of_group(int rank, size_t group) const {
    return by_rank_[rank][group];
  }
  /// What each rank owns of all groups.
  const std::vector<std::vector<at::Tensor>>& owned() const {
    return owned_;
  }
  size_t num_params() const {
    return num_params_;
  }

 private:
  std::vector<std::vector<std::vector<at::Tensor>>> by_rank_; // then by group
  std::vector<std::vector<at::Tensor>> owned_; // by rank
  size_t num_params_ = 0;
  std::vector<int64_t> num_elements_;
};

} // namespace tessera::zero
