// The parameters that each rank steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <unordered_map>
#include <vector>

#include "zero/owner_assignment.h"

namespace tessera::zero {

/// Parameters of all groups by their owners, which an OwnerAssignment chooses.
/// A new group does not move parameters of earlier groups.
class Partition {
 public:
  explicit Partition(int num_ranks)
      : by_rank_(num_ranks), owned_(num_ranks), owners_(num_ranks) {}

  void add_group(const std::vector<at::Tensor>& params);

  /// The parameters of a group that `rank` owns, the largest first; may be
  /// empty.
  const std::vector<at::Tensor>& of_group(int rank, size_t group) const {
    return by_rank_[rank][group];
  }
  /// The parameters of all groups that each rank owns.
  const std::vector<std::vector<at::Tensor>>& owned() const {
    return owned_;
  }
  /// The groups as they were added, each in its order.
  const std::vector<std::vector<at::Tensor>>& groups() const {
    return groups_;
  }
  /// Where a parameter was added; nothing if it was not.
  struct Place {
    size_t group = 0;
    size_t index = 0;
  };
  std::optional<Place> place_of(const at::Tensor& param) const;

 private:
  std::vector<std::vector<std::vector<at::Tensor>>> by_rank_; // then by group
  std::vector<std::vector<at::Tensor>> owned_; // by rank
  std::vector<std::vector<at::Tensor>> groups_;
  std::unordered_map<const c10::TensorImpl*, Place> places_;
  OwnerAssignment owners_;
};

} // namespace tessera::zero
