#include "fsdp/incoming.h"

#include <tessera/comm/agree.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "comm/together.h"
#include "shard/boxes.h"

namespace tessera::fsdp {
namespace {

bool is_within(const Group& inner, const Group& outer) {
  const auto& ranks = outer.global_ranks();
  return std::all_of(
      inner.global_ranks().begin(), inner.global_ranks().end(), [&](int rank) {
        return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      });
}

/// Boxes that are what this rank needs of the parameter.
bool lies_here(const ModelParam& param, const ShardedTensor& tensor) {
  const auto& pieces = tensor.pieces();
  if (pieces.size() == 1 && pieces[0].box.sizes == tensor.sizes()) {
    return true;
  }
  const shard::Run run = param.run();
  const auto boxes =
      shard::boxes_of(tensor.sizes(), run.param_begin, run.numel);
  return std::equal(
      boxes.begin(),
      boxes.end(),
      pieces.begin(),
      pieces.end(),
      [](const Box& box, const auto& piece) { return box == piece.box; });
}

/// This rank's part of the parameter, flattened, if it lies here.
std::optional<at::Tensor> local_part(
    const ModelParam& param,
    const ShardedTensor& tensor) {
  if (!lies_here(param, tensor)) {
    return std::nullopt;
  }
  const auto& pieces = tensor.pieces();
  if (pieces.size() == 1 && pieces[0].box.sizes == tensor.sizes()) {
    return part_of_whole(param, pieces[0].tensor);
  }
  std::vector<at::Tensor> parts;
  for (const auto& piece : pieces) {
    parts.push_back(piece.tensor.detach().reshape({-1}));
  }
  if (parts.empty()) {
    return at::empty({0}, at::TensorOptions().dtype(tensor.dtype()));
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts);
}

} // namespace

at::Tensor part_of_whole(const ModelParam& param, const at::Tensor& whole) {
  const shard::Run run = param.run();
  return whole.detach().reshape({-1}).narrow(0, run.param_begin, run.numel);
}

void Incoming::add(const ModelParam& param, const ShardedTensor& tensor) {
  items_.push_back({&param, &tensor});
}

void Incoming::agree(const std::vector<Group>& groups, std::string_view call) {
  if (groups
          .empty()) { // nothing is sharded here: the tensors' own ranks decide
    for (const Item& item : items_) {
      if (item.tensor->group().size() > 1) {
        moves_.insert(item.tensor);
      }
    }
  }
  comm::for_each_group(groups, [&](const Group& group) {
    std::vector<const Item*> items;
    Bytes is_here;
    for (const Item& item : items_) {
      const Group& its = item.param->is_sharded()
          ? item.param->unit->groups().all
          : groups.front();
      if (its.name() == group.name()) {
        items.push_back(&item);
        is_here.push_back(lies_here(*item.param, *item.tensor) ? 1 : 0);
      }
    }
    const auto by_rank = group.all_gather_bytes(is_here, "what moves");
    std::optional<std::string> problem;
    for (size_t i = 0; i < items.size(); ++i) {
      const bool everywhere =
          std::all_of(by_rank.begin(), by_rank.end(), [&](const Bytes& bytes) {
            return i < bytes.size() && bytes[i] == 1;
          });
      if (everywhere) {
        continue;
      }
      moves_.insert(items[i]->tensor);
      const Group& holders = items[i]->tensor->group();
      if (!is_within(holders, group)) {
        problem = fmt::format(
            "\"{}\" is sharded over the ranks {}, of which only {} take part. Use a full state dict.",
            items[i]->param->name,
            fmt::join(holders.global_ranks(), ", "),
            fmt::join(group.global_ranks(), ", "));
      }
    }
    fail_together(group, call, problem);
  });
}

at::Tensor Incoming::take(const ModelParam& param, const ShardedTensor& tensor)
    const {
  const auto part =
      moves_.contains(&tensor) ? std::nullopt : local_part(param, tensor);
  return part ? *part : part_of_whole(param, tensor.full_tensor());
}

} // namespace tessera::fsdp
