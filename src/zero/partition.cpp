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
  num_params_ += params.size();
}

} // namespace tessera::zero
