#include "engine/start.h"

#include <tessera/error.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "base/xxh3.h"
#include "engine/unit.h"

namespace tessera::engine {
namespace {

constexpr int64_t kSums = 1024;

uint64_t hash_of(const at::Tensor& host) {
  static const Xxh3 xxh3 = best_xxh3();
  return xxh3(host.const_data_ptr(), host.nbytes());
}

/// The bits as integers, so that a sum loses none of them.
at::Tensor bits_of(const at::Tensor& flat) {
  switch (flat.element_size()) {
    case 1:
      return flat.view(at::kByte);
    case 2:
      return flat.view(at::kShort);
    case 4:
      return flat.view(at::kInt);
    default:
      return flat.view(at::kLong);
  }
}

/// "rank 1", "ranks 1, 3".
std::string list_of(const std::vector<int>& ranks) {
  return fmt::format(
      "rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

constexpr std::string_view kLabel = "values that ranks begin with";

/// The same units in the same order on all ranks of `group`.
void compare_starts(const std::vector<Unit*>& units, const Group& group) {
  int64_t count = 0;
  for (const Unit* unit : units) {
    count += 2 * static_cast<int64_t>(unit->start().params().size());
  }
  const at::Tensor mine = at::empty({count}, at::kLong);
  auto* next = mine.mutable_data_ptr<int64_t>();
  for (const Unit* unit : units) {
    for (const UnitStart::Param& param : unit->start().params()) {
      *next++ = param.was_written ? 1 : 0;
      *next++ = static_cast<int64_t>(param.digest);
    }
  }
  if (is_same_on_all(hash_of(mine), group, kLabel)) {
    return;
  }
  const at::Tensor all = at::empty({group.size(), count}, at::kLong);
  group.all_gather_into(all, mine, kLabel);
  const auto table = all.accessor<int64_t, 2>();
  const auto differing = [&](int64_t column, int64_t expected) {
    std::vector<int> ranks;
    for (int rank = 0; rank < group.size(); ++rank) {
      if (table[rank][column] != expected) {
        ranks.push_back(group.global_ranks()[static_cast<size_t>(rank)]);
      }
    }
    return ranks;
  };
  int64_t column = 0;
  for (const Unit* unit : units) {
    for (const UnitStart::Param& param : unit->start().params()) {
      const bool was_written = !differing(column++, 0).empty();
      const std::vector<int> others = differing(column, table[0][column]);
      ++column;
      if (was_written || others.empty()) {
        continue;
      }
      raise<DisagreementError>(
          {.call = "forward",
           .rank = group.global_ranks()[static_cast<size_t>(group.rank())],
           .unit = unit->name(),
           .parameter = param.name},
          fmt::format(
              "{} began with other values than rank {}, so the model would be made of parts of different models. "
              "Call tessera::seed(0) on every rank before the model is built, or load the model's state before it is used; FSDP can take rank 0's values, FSDPOptions().sync_module_states(true). "
              "If the values are meant to differ, set compare_start(false) in the options.",
              list_of(others),
              group.global_ranks().front()));
    }
  }
}

} // namespace

uint64_t digest_of(const at::Tensor& values) {
  const at::Tensor flat = values.detach().contiguous().view({-1});
  if (flat.is_cpu() || flat.numel() < 2 * kSums) {
    return hash_of(flat.cpu());
  }
  return digest_by_sums(flat);
}

uint64_t digest_by_sums(const at::Tensor& flat) {
  const at::Tensor bits = bits_of(flat);
  const int64_t even = bits.numel() / kSums * kSums;
  const at::Tensor table = bits.narrow(0, 0, even);
  const uint64_t parts[] = {
      hash_of(table.view({kSums, -1}).sum(1, false, at::kLong).cpu()),
      hash_of(table.view({-1, kSums}).sum(0, false, at::kLong).cpu()),
      hash_of(bits.narrow(0, even, bits.numel() - even).cpu())};
  static const Xxh3 xxh3 = best_xxh3();
  return xxh3(parts, sizeof parts);
}

bool is_same_on_all(
    uint64_t digest,
    const Group& group,
    std::string_view label) {
  // The largest digest is also the smallest then.
  const at::Tensor both = at::empty({2}, at::kLong);
  auto* ends = both.mutable_data_ptr<int64_t>();
  ends[0] = static_cast<int64_t>(digest);
  ends[1] = ~ends[0];
  group.all_reduce(both, ReduceOp::Max, label);
  return ends[0] == ~ends[1];
}

void begin_use(const Unit& unit, const std::map<int, Unit*>& units) {
  if (!unit.start().is_open()) {
    return;
  }
  std::vector<Unit*> fresh; // of the same model, in an order that ranks share
  for (const auto& [number, other] : units) {
    if (other->start().is_open() && &other->root() == &unit.root()) {
      fresh.push_back(other);
    }
  }
  compare_starts(fresh, unit.groups().all);
  for (Unit* other : fresh) {
    other->start().close();
  }
}

} // namespace tessera::engine
