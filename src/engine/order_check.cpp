#include "engine/order_check.h"

#include <tessera/error.h>

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <string>

#include "engine/start.h"

namespace tessera::engine {

void OrderCheck::note(Event event, int unit) {
  constexpr uint64_t kPrime = 1099511628211ULL; // FNV-1a
  const auto mix = [this](uint64_t value) { hash_ = (hash_ ^ value) * kPrime; };
  mix(static_cast<uint64_t>(event));
  mix(static_cast<uint64_t>(unit));
  unchecked_gathers_ += event == Event::Gather ? 1 : 0;
}

void OrderCheck::forget_events() {
  hash_ = 0;
  unchecked_gathers_ = 0;
}

void OrderCheck::reset() {
  forget_events();
  failure_ = nullptr;
}

std::optional<std::vector<bool>> OrderCheck::compare_with_use(
    const std::vector<bool>& used) {
  const bool in_doubt =
      std::find(used.begin(), used.end(), false) != used.end();
  if (is_paused_ && !is_alone()) {
    forget_events();
    if (failure_) {
      fail_after_hook(group_.rank());
    }
    if (in_doubt) {
      raise(
          {.call = "backward"},
          "a parameter of this model got no gradient on this rank, and in a captured step the ranks cannot tell each other about it. Use every parameter that is not frozen, or run the step without CapturedStep.");
    }
    return std::nullopt;
  }
  const int64_t plain = is_alone() ? 0 : plain_.digest();
  const auto forget = c10::make_scope_exit([this] { plain_.forget_once(); });
  if (!exchange(in_doubt, plain)) {
    return std::nullopt;
  }
  if (is_alone()) {
    return used;
  }
  // One element more: ranks that reduced nothing take part.
  const at::Tensor flags =
      at::empty({static_cast<int64_t>(used.size()) + 1}, at::kByte);
  auto* bytes = flags.mutable_data_ptr<uint8_t>();
  std::copy(used.begin(), used.end(), bytes);
  bytes[used.size()] = 0;
  group_.all_reduce(flags, ReduceOp::Max, "unused parameters");
  std::vector<bool> by_any(used.size());
  std::transform(bytes, bytes + used.size(), by_any.begin(), [](uint8_t flag) {
    return flag != 0;
  });
  return by_any;
}

void OrderCheck::compare_plain() {
  const bool is_same =
      is_alone() ||
      is_same_on_all(
          static_cast<uint64_t>(plain_.digest()), group_, "plain parameters");
  if (!is_same) {
    plain_.compare(group_);
  }
}

void OrderCheck::fail_after_hook(int rank) {
  const auto own = std::exchange(failure_, nullptr);
  if (own) {
    std::rethrow_exception(own);
  }
  raise(
      {.call = "backward", .rank = group_.rank(), .world_size = group_.size()},
      "a hook that was registered on a shard threw on rank " +
          std::to_string(group_.global_ranks()[static_cast<size_t>(rank)]) +
          "; see that rank's own error.");
}

/// Throws on all ranks unless they did the same. Returns whether any of them is
/// in doubt.
bool OrderCheck::exchange(bool in_doubt, int64_t plain) {
  unchecked_gathers_ = 0;
  const auto mine = static_cast<int64_t>(std::exchange(hash_, 0));
  if (group_.size() == 1) {
    if (failure_) {
      fail_after_hook(0);
    }
    return in_doubt;
  }
  constexpr int64_t kInDoubt = 1;
  constexpr int64_t kHookThrew = 2;
  constexpr int64_t kPlain = ~(kInDoubt | kHookThrew);
  const at::Tensor sent = at::empty({2}, at::kLong);
  sent.mutable_data_ptr<int64_t>()[0] = mine;
  sent.mutable_data_ptr<int64_t>()[1] = (in_doubt ? kInDoubt : 0) |
      (failure_ ? kHookThrew : 0) | (plain & kPlain);
  const at::Tensor all = at::empty({group_.size(), 2}, at::kLong);
  group_.all_gather_into(all, sent, "order of collectives");
  const int64_t* received = all.const_data_ptr<int64_t>();
  bool any_in_doubt = false;
  bool is_plain_equal = true;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const int64_t theirs = received[2 * rank + 1];
    any_in_doubt = any_in_doubt || (theirs & kInDoubt) != 0;
    is_plain_equal =
        is_plain_equal && (theirs & kPlain) == (received[1] & kPlain);
    if (received[2 * rank] != received[0]) {
      raise<DisagreementError>(
          {.call = "backward",
           .rank = group_.rank(),
           .world_size = group_.size()},
          "ranks gathered or reduced different units in this step, so gradients may be mixed up. A forward must touch the same units in the same order on every rank; look for a branch that depends on the rank or its data. TESSERA_CHECK=1 names the first call that differs.");
    }
  }
  for (int rank = 0; rank < group_.size(); ++rank) {
    if ((received[2 * rank + 1] & kHookThrew) != 0) {
      fail_after_hook(rank);
    }
  }
  if (!is_plain_equal) {
    plain_.compare(group_);
  }
  return any_in_doubt;
}

} // namespace tessera::engine
