#include "zero/partition.h"

namespace tessera::zero {

void Partition::add_group(const std::vector<at::Tensor>& params) {
  for (auto& groups : by_rank_) {
    groups.emplace_back();
  }
  std::vector<int64_t> numels;
  for (const at::Tensor& param : params) {
    numels.push_back(param.numel());
  }
  for (const auto& [param, rank] : owners_.add_group(numels)) {
    by_rank_[rank].back().push_back(params[param]);
    owned_[rank].push_back(params[param]);
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
