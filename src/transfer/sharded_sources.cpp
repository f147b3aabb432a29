#include "transfer/sharded_sources.h"

#include <tessera/comm/agree.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <string>

#include "base/byte_vector.h"
#include "comm/group/all_or_none.h"
#include "engine/boxes.h"

namespace tessera::transfer {
namespace {

bool is_within(const Group& inner, const Group& outer) {
  const auto& ranks = outer.global_ranks();
  return std::all_of(
      inner.global_ranks().begin(), inner.global_ranks().end(), [&](int rank) {
        return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
      });
}

/// Whether the pieces are the boxes that this rank needs of the parameter.
bool lies_here(const ModelParam& param, const ShardedTensor& tensor) {
  const auto& pieces = tensor.pieces();
  if (pieces.size() == 1 && pieces[0].box.sizes == tensor.sizes()) {
    return true;
  }
  const engine::Run run = param.run();
  const auto boxes =
      engine::boxes_of(tensor.sizes(), run.param_begin, run.numel);
  return std::equal(
      boxes.begin(),
      boxes.end(),
      pieces.begin(),
      pieces.end(),
      [](const ShardedTensor::Box& box, const auto& piece) {
        return box == piece.box;
      });
}

/// This rank's part of the parameter, flattened, if this rank has it.
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

/// For each item whether all ranks say that they have what they need.
std::vector<bool> all_say(const Group& group, const Bytes& is_here) {
  std::vector<bool> result(is_here.size(), true);
  for (const Bytes& theirs : group.all_gather_bytes(is_here, "what moves")) {
    for (size_t i = 0; i < result.size(); ++i) {
      result[i] = result[i] && i < theirs.size() && theirs[i] == 1;
    }
  }
  return result;
}

} // namespace

at::Tensor part_of_whole(const ModelParam& param, const at::Tensor& whole) {
  const engine::Run run = param.run();
  return whole.detach().reshape({-1}).narrow(0, run.param_begin, run.numel);
}

bool ShardedSources::Item::lies_here() const {
  return !is_needed || transfer::lies_here(*param, *tensor);
}

void ShardedSources::add(
    const ModelParam& param,
    const ShardedTensor& tensor,
    bool is_needed) {
  items_.push_back({&param, &tensor, is_needed});
  if (!is_needed) {
    unneeded_.insert(&tensor);
  }
}

/// If no unit of the model is sharded, the ranks of each tensor decide.
void ShardedSources::agree_by_tensor() {
  std::map<std::string, std::vector<const Item*>> by_group;
  std::vector<Group> groups; // in the order of the tensors, as on all ranks
  for (const Item& item : items_) {
    auto& items = by_group[item.tensor->group().name()];
    if (items.empty()) {
      groups.push_back(item.tensor->group());
    }
    items.push_back(&item);
  }
  for (const Group& group : groups) {
    const auto& items = by_group.at(group.name());
    Bytes is_here;
    for (const Item* item : items) {
      is_here.push_back(item->lies_here() ? 1 : 0);
    }
    const auto everywhere = all_say(group, is_here);
    for (size_t i = 0; i < items.size(); ++i) {
      if (!everywhere[i]) {
        moves_.insert(items[i]->tensor);
      }
    }
  }
}

void ShardedSources::agree(
    const std::vector<Group>& groups,
    std::string_view call) {
  if (groups.empty()) {
    agree_by_tensor();
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
        is_here.push_back(item.lies_here() ? 1 : 0);
      }
    }
    const auto everywhere = all_say(group, is_here);
    std::optional<std::string> problem;
    for (size_t i = 0; i < items.size(); ++i) {
      if (everywhere[i]) {
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

bool ShardedSources::is_in(
    const ModelParam& param,
    const ShardedTensor& tensor,
    const at::Tensor& memory) const {
  if (moves_.contains(&tensor) || unneeded_.contains(&tensor) ||
      !transfer::lies_here(param, tensor)) {
    return false;
  }
  int64_t begin = 0;
  for (const auto& piece : tensor.pieces()) {
    const int64_t numel = piece.tensor.numel();
    if (begin + numel > memory.numel() || !piece.tensor.is_contiguous() ||
        piece.tensor.const_data_ptr() !=
            memory.narrow(0, begin, numel).const_data_ptr()) {
      return false;
    }
    begin += numel;
  }
  return begin == memory.numel();
}

at::Tensor ShardedSources::take(
    const ModelParam& param,
    const ShardedTensor& tensor) const {
  if (!moves_.contains(&tensor)) {
    if (unneeded_.contains(&tensor)) {
      return {};
    }
    if (const auto part = local_part(param, tensor)) {
      return *part;
    }
  }
  return part_of_whole(param, tensor.full_tensor());
}

} // namespace tessera::transfer
