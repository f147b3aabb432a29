#include "train/captured/step_agreement.h"

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "comm/group/all_or_none.h"

namespace tessera::train {
namespace {

std::optional<Group> first_of(const std::vector<Group>& groups) {
  return groups.empty() ? std::nullopt : std::optional(groups.front());
}

/// The greatest of each of these numbers on any rank, and whether all ranks
/// have the same. Collective.
struct Greatest {
  std::vector<int64_t> values;
  std::vector<bool> are_alike;
};
Greatest greatest_of(
    const Group& group,
    std::initializer_list<int64_t> numbers) {
  const auto count = static_cast<int64_t>(numbers.size());
  const at::Tensor wire = at::empty({2, count}, at::kLong);
  auto* values = wire.mutable_data_ptr<int64_t>();
  auto* complements = values + count; // the greatest is that of the smallest
  std::copy(numbers.begin(), numbers.end(), values);
  std::transform(
      numbers.begin(), numbers.end(), complements, [](int64_t number) {
        return ~number;
      });
  group.all_reduce(wire, ReduceOp::Max, kCapturedStep);
  Greatest greatest;
  for (int64_t i = 0; i < count; ++i) {
    greatest.values.push_back(values[i]);
    greatest.are_alike.push_back(values[i] == ~complements[i]);
  }
  return greatest;
}

} // namespace

StepRanks::StepRanks(const StepParts& parts)
    : group_(first_of(parts.groups())) {}

Decision StepRanks::agree(Decision mine, uint64_t collectives) const {
  if (!group_) {
    return mine;
  }
  const auto all = greatest_of(
      *group_,
      {static_cast<int64_t>(mine.action),
       mine.is_expected ? 1 : 0,
       static_cast<int64_t>(collectives)});
  const auto action = static_cast<Action>(all.values[0]);
  if (action == Action::Replay && !all.are_alike[2]) {
    return {Action::Record}; // anew, and alike
  }
  if (all.values[1] != 0) { // a rank runs eagerly, as it is meant to
    return mine.is_expected
        ? std::move(mine)
        : Decision{
              .reason = "another rank runs this step eagerly first.",
              .is_expected = true};
  }
  if (action == Action::Run && mine.action != Action::Run) {
    return {Action::Run, "another rank cannot capture its part of the step."};
  }
  return {action, std::move(mine.reason)};
}

std::string StepRanks::agree_on_capture(
    const std::string& reason,
    uint64_t collectives) const {
  if (!group_) {
    return reason;
  }
  const auto failures = comm::share_failures(
      *group_,
      reason.empty() ? std::nullopt : std::optional<std::string>(reason),
      kCapturedStep);
  if (!failures.empty()) {
    const auto& [rank, text] = *failures.begin();
    return fmt::format("on rank {}: {}", rank, text);
  }
  const auto all = greatest_of(*group_, {static_cast<int64_t>(collectives)});
  return all.are_alike[0]
      ? ""
      : "the ranks captured different collectives. Every rank must make the same forwards, backwards and exchanges in each call.";
}

} // namespace tessera::train
