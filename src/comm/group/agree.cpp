#include <tessera/comm/agree.h>
#include <tessera/comm/init.h>
#include <tessera/error.h>

#include <ATen/ops/empty.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/byte_vector.h"
#include "base/fields.h"
#include "comm/group/all_or_none.h"
#include "comm/group/group_impl.h"
#include "libtorch/recording.h"

namespace tessera {
namespace {

std::vector<std::string> decode(const Bytes& bytes) {
  auto items = decode_fields(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  TESSERA_INTERNAL_ASSERT(items, "the items of a peer cannot be read");
  return std::move(*items);
}

std::span<const uint8_t> as_bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

/// The first item on which the ranks differ, and who has what there.
std::string describe_difference(
    const Group& group,
    const std::vector<std::vector<std::string>>& lists) {
  size_t item = 0;
  const auto differs = [&](const std::vector<std::string>& list) {
    const auto& first = lists.front();
    return item < std::min(list.size(), first.size())
        ? list[item] != first[item]
        : list.size() != first.size();
  };
  while (std::none_of(lists.begin(), lists.end(), differs)) {
    ++item;
  }
  std::vector<std::string> texts;
  for (const auto& list : lists) {
    texts.push_back(
        item < list.size() ? list[item] : "nothing (its list ends)");
  }
  const bool is_only =
      std::all_of(lists.begin(), lists.end(), [](const auto& list) {
        return list.size() == 1;
      });
  return "ranks were given different things" +
      (is_only ? ":" : fmt::format(" (item {}):", item)) +
      comm::list_by_text(texts, group.global_ranks()) +
      "\n  All ranks must make this call alike; look for what depends on the rank.";
}

} // namespace

void agree(
    const Group& group,
    std::string_view call,
    const std::vector<std::string>& items) {
  if (group.size() == 1) {
    return;
  }
  const std::string text = encode_fields(items);
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  at::Tensor mine = at::empty({2}, at::kLong);
  std::memcpy(mine.mutable_data_ptr(), &hash, sizeof hash);
  at::Tensor all = at::empty({group.size(), 2}, at::kLong);
  group.all_gather_into(all, mine, "agree");
  const int64_t* digest = all.const_data_ptr<int64_t>();
  bool equal = true;
  for (int rank = 1; rank < group.size(); ++rank) {
    equal = equal && digest[2 * rank] == digest[0] &&
        digest[2 * rank + 1] == digest[1];
  }
  if (equal) {
    return;
  }
  std::vector<std::vector<std::string>> lists;
  for (const Bytes& bytes : group.all_gather_bytes(as_bytes(text), "agree")) {
    lists.push_back(decode(bytes));
  }
  group.impl().raise_error<DisagreementError>(
      call, describe_difference(group, lists));
}

void fail_together(
    const Group& group,
    std::string_view call,
    const std::optional<std::string>& error) {
  if (group.size() == 1) {
    if (error) {
      group.impl().raise_error(call, *error);
    }
    return;
  }
  const auto failures = comm::share_failures(group, error, "fail_together");
  if (failures.empty()) {
    return;
  }
  std::string text;
  for (const auto& [rank, failure] : failures) {
    text += fmt::format(
        "{}rank {} failed: {}",
        text.empty() ? "" : "\n  ",
        group.global_ranks()[static_cast<size_t>(rank)],
        failure);
  }
  group.impl().raise_error(call, text);
}

void step_token(int64_t step, const Group& given) {
  libtorch::refuse_in_recording(
      "step_token", "Call it before the captured step.");
  const Group group = given.valid() ? given : world();
  if (group.size() == 1) {
    return;
  }
  const at::Tensor mine = at::empty({1}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = step;
  const at::Tensor all = at::empty({group.size()}, at::kLong);
  group.all_gather_into(all, mine, "step_token");
  const int64_t* steps = all.const_data_ptr<int64_t>();
  std::vector<std::string> texts;
  bool equal = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    equal = equal && steps[rank] == steps[0];
    texts.push_back(fmt::format("step {}", steps[rank]));
  }
  if (!equal) {
    group.impl().raise_error<DisagreementError>(
        "step_token",
        "the ranks are not at the same step:" +
            comm::list_by_text(texts, group.global_ranks()) +
            "\n  A rank that leaves a step out leaves it out alone. Let its exception end the program, or agree with the other ranks (fail_together) to leave it out on all of them.");
  }
}

} // namespace tessera
