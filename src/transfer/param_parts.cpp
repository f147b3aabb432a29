#include "transfer/param_parts.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_map>

#include "engine/exchange.h"

namespace tessera::transfer {
namespace {

/// For each unit the positions of its parts, in the order of their first parts.
std::vector<std::vector<size_t>> by_unit(const std::vector<ParamPart>& parts) {
  std::vector<std::vector<size_t>> result;
  std::unordered_map<const engine::Unit*, size_t> places;
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto [place, is_new] =
        places.emplace(parts[i].param->unit.get(), result.size());
    if (is_new) {
      result.emplace_back();
    }
    result[place->second].push_back(i);
  }
  return result;
}

/// The position of a rank of the world in the group, if it is there.
std::optional<int> rank_in(const Group& group, int rank) {
  const auto& ranks = group.global_ranks();
  const auto found = std::find(ranks.begin(), ranks.end(), rank);
  return found == ranks.end()
      ? std::nullopt
      : std::optional(static_cast<int>(found - ranks.begin()));
}

} // namespace

std::vector<at::Tensor> gather(
    const std::vector<ParamPart>& parts,
    std::optional<int> root,
    bool to_cpu) {
  std::vector<at::Tensor> wholes(parts.size());
  for (const auto& indices : by_unit(parts)) {
    const engine::Unit& unit = *parts[indices.front()].param->unit;
    const Group& group = unit.groups().shard;
    const auto root_here = root ? rank_in(group, *root) : std::nullopt;
    if (root && !root_here) {
      continue; // another copy of the model has the root
    }
    std::vector<engine::Part> cut;
    for (const size_t i : indices) {
      cut.push_back({parts[i].param->cut(), parts[i].mine.contiguous()});
    }
    const auto gathered = engine::gather(cut, group, root_here, unit.name());
    for (size_t i = 0; i < indices.size(); ++i) {
      wholes[indices[i]] =
          to_cpu && gathered[i].defined() ? gathered[i].cpu() : gathered[i];
    }
  }
  return wholes;
}

void check_root(const ModelParam& param, int root, std::string_view call) {
  const Group& all = param.unit->groups().all;
  if (!rank_in(all, root)) {
    raise<c10::ValueError>(
        {.call = call, .unit = param.unit->name(), .parameter = param.name},
        fmt::format(
            "its unit is spread over the ranks {}, and rank {} is not among them. Choose a group whose rank 0 is.",
            fmt::join(all.global_ranks(), ", "),
            root));
  }
}

/// Scatters to the ranks of the root's copy of the model, which send on to the
/// other copies.
void scatter(
    const std::vector<at::Tensor>& wholes,
    const std::vector<ParamPart>& parts,
    int root) {
  for (const auto& indices : by_unit(parts)) {
    const engine::Unit& unit = *parts[indices.front()].param->unit;
    const engine::Groups& groups = unit.groups();
    if (const auto root_here = rank_in(groups.shard, root)) {
      std::vector<engine::Part> cut;
      std::vector<at::Tensor> whole;
      for (const size_t i : indices) {
        cut.push_back({parts[i].param->cut(), parts[i].mine});
        whole.push_back(
            wholes[i].defined()
                ? wholes[i].detach().to(parts[i].mine.device()).contiguous()
                : at::Tensor());
      }
      engine::scatter(whole, cut, groups.shard, *root_here, unit.name());
    }
    if (groups.replicate.valid()) {
      // Ranks of a group come copy by copy.
      const int copy = *rank_in(groups.all, root) / groups.shard.size();
      for (const size_t i : indices) {
        groups.replicate.broadcast(parts[i].mine, copy, parts[i].param->name);
      }
    }
  }
}

} // namespace tessera::transfer
