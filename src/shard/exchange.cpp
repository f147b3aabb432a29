#include "shard/exchange.h"

#include <ATen/ops/empty.h>

namespace tessera::shard {

Cut Cut::of(const Layout& layout, size_t param) {
  Cut cut{layout.shape(param), {}};
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    cut.numels.push_back(layout.run(param, rank).numel);
  }
  return cut;
}

namespace {

/// Every part to every rank. One broadcast a rank, since parts differ in size.
at::Tensor gather_everywhere(
    const Cut& cut,
    const at::Tensor& part,
    const Group& group,
    std::string_view label) {
  const at::Tensor whole = at::empty(cut.shape, part.options());
  const at::Tensor flat = whole.view({-1});
  int64_t begin = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t numel = cut.numels[static_cast<size_t>(rank)];
    const at::Tensor range = flat.narrow(0, begin, numel);
    begin += numel;
    if (numel == 0) {
      continue;
    }
    if (rank == group.rank()) {
      range.copy_(part);
    }
    group.broadcast(range, rank, label);
  }
  return whole;
}

} // namespace

at::Tensor gather(
    const Cut& cut,
    const at::Tensor& part,
    const Group& group,
    std::optional<int> root,
    std::string_view label) {
  if (group.size() == 1) {
    return part.clone().view(cut.shape);
  }
  if (!root) {
    return gather_everywhere(cut, part, group, label);
  }
  const std::vector<int64_t> none(cut.numels.size(), 0);
  std::vector<int64_t> sends = none;
  sends[static_cast<size_t>(*root)] = part.numel();
  if (group.rank() != *root) {
    group.all_to_all(at::empty({0}, part.options()), part, none, sends, label);
    return {};
  }
  const at::Tensor whole = at::empty(cut.shape, part.options());
  group.all_to_all(whole.view({-1}), part, cut.numels, sends, label);
  return whole;
}

void scatter(
    const Cut& cut,
    const at::Tensor& whole,
    const at::Tensor& part,
    const Group& group,
    int root,
    std::string_view label) {
  const std::vector<int64_t> none(cut.numels.size(), 0);
  std::vector<int64_t> receives = none;
  receives[static_cast<size_t>(root)] = part.numel();
  if (group.rank() == root) {
    group.all_to_all(
        part, whole.contiguous().view({-1}), receives, cut.numels, label);
  } else {
    group.all_to_all(
        part, at::empty({0}, part.options()), receives, none, label);
  }
}

} // namespace tessera::shard
