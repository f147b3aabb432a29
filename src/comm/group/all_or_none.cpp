#include "comm/group/all_or_none.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <exception>

#include "libtorch/recording.h"

namespace tessera::comm {

std::map<int, std::string> share_failures(
    const Group& group,
    const std::optional<std::string>& mine,
    std::string_view label) {
  libtorch::refuse_in_recording(
      label,
      "The ranks tell each other on the host whether it failed: make this call before or after the captured step.");
  at::Tensor failed = at::empty({1}, at::kInt);
  failed.mutable_data_ptr<int32_t>()[0] = mine ? 1 : 0;
  group.all_reduce(failed, ReduceOp::Max, label);
  if (failed.const_data_ptr<int32_t>()[0] == 0) {
    return {};
  }
  const std::string marked = mine ? "!" + *mine : ""; // a failure may be ""
  const auto all = group.all_gather_bytes(
      {reinterpret_cast<const uint8_t*>(marked.data()), marked.size()}, label);
  std::map<int, std::string> failures;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) {
      failures.emplace(
          static_cast<int>(rank),
          std::string(all[rank].begin() + 1, all[rank].end()));
    }
  }
  return failures;
}

void all_or_none(
    const std::vector<Group>& groups,
    std::string_view call,
    const std::function<void()>& body) {
  if (libtorch::is_recorded_here()) {
    body();
    return;
  }
  std::exception_ptr own;
  std::optional<std::string> text;
  try {
    body();
  } catch (const c10::Error& error) {
    own = std::current_exception();
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = error.what();
  }
  std::optional<std::string> told;
  try {
    for_each_group(
        groups, [&](const Group& group) { fail_together(group, call, text); });
  } catch (const c10::DistError&) {
    throw; // a peer is gone
  } catch (const c10::Error& error) {
    told = error.what_without_backtrace();
  }
  if (own) {
    std::rethrow_exception(own);
  }
  if (told) {
    raise<c10::ValueError>({}, *told);
  }
}

void for_each_group(
    const std::vector<Group>& groups,
    const std::function<void(const Group&)>& body) {
  std::exception_ptr first;
  for (const Group& group : groups) {
    try {
      body(group);
    } catch (const c10::Error&) {
      first = first ? first : std::current_exception();
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

} // namespace tessera::comm
