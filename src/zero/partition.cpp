#include "zero/partition.h"

#include <algorithm>

namespace tessera::zero {

void Partition::add_group(const std::vector<at::Tensor>& params) {
  for (auto& groups : by_rank_) {
    groups.emplace_back();
  }
  std::vector<at::Tensor> sorted = params;
  std::stable_sort(
      sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
        return a.numel() > b.numel();
      });
  for (const at::Tensor& param : sorted) {
    const auto least =
        std::min_element(num_elements_.begin(), num_elements_.end());
    *least += param.numel();
    const auto rank = least - num_elements_.begin();
    by_rank_[rank].back().push_back(param);
    owned_[rank].push_back(param);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    places_[params[i].unsafeGetTensorImpl()] = {groups_.size(), i};
  }
  groups_.push_back(params);
}

std::optional<Partition::Place> Partition::place_of(
    const at::Tensor& param) const {
  const auto found = places_.find(param.unsafeGetTensorImpl());
  return found == places_.end() ? std::nullopt : std::optional(found->second);
}

} // namespace tessera::zero
