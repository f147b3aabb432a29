#include "ddp/backward_agreement.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/group/all_or_none.h"
#include "comm/group/group_impl.h"

namespace tessera::ddp {
namespace {

constexpr size_t kMaxNamed = 8;

std::string list_some(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (size_t i = 0; i < std::min(names.size(), kMaxNamed); ++i) {
    quoted.push_back('"' + names[i] + '"');
  }
  return fmt::format(
      "{}{}", fmt::join(quoted, ", "), names.size() > kMaxNamed ? ", ..." : "");
}

bool is_dist_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistError&) {
    return true;
  } catch (...) {
    return false;
  }
}

} // namespace

void fail_if_any_hook_threw(
    const Group& group,
    const Group& control,
    std::exception_ptr& failure) {
  const at::Tensor mine = at::empty({1}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = failure ? 1 : 0;
  control.all_reduce(mine, ReduceOp::Sum, "ddp: communication hooks");
  const int64_t num_failed = mine.const_data_ptr<int64_t>()[0];
  if (num_failed == 0) {
    return;
  }
  if (num_failed < control.size()) { // the others made its collectives
    group.impl().give_up("a communication hook threw on some ranks");
  }
  const auto own = std::exchange(failure, nullptr);
  const bool is_lost = own && is_dist_error(own);
  comm::all_or_none({control}, "communication hook", [&] {
    if (own && !is_lost) { // otherwise it follows from another rank's error
      std::rethrow_exception(own);
    }
  });
  if (own) {
    std::rethrow_exception(own);
  }
  raise<PeerLostError>(
      {.call = "DistributedDataParallel",
       .rank = group.rank(),
       .world_size = group.size()},
      "another rank lost a peer in a communication hook; see its own error.");
}

void compare_forwards(const Group& group, const int64_t* by_rank) {
  int first = -1;
  for (int rank = 0; rank < group.size(); ++rank) {
    const int64_t theirs = by_rank[3 * rank + 2];
    if (theirs < 0) {
      continue; // it has no inputs
    }
    if (first < 0) {
      first = rank;
    }
    if (theirs != by_rank[3 * first + 2]) {
      raise<DisagreementError>(
          {.call = "DistributedDataParallel backward",
           .rank = group.rank(),
           .world_size = group.size()},
          fmt::format(
              "since the last reduction rank {} made {} forwards through the handle, rank {} made {}, so these would be gradients of different steps. Either a backward reached no parameter on one of them, or one of them called the handle where the others did not: evaluate under torch::NoGradGuard or with eval().",
              group.global_ranks()[static_cast<size_t>(first)],
              by_rank[3 * first + 2],
              group.global_ranks()[static_cast<size_t>(rank)],
              theirs));
    }
  }
}

void refuse_missing(
    const Group& group,
    const std::vector<std::string>& names,
    size_t num_params) {
  std::optional<std::string> error;
  if (!names.empty()) {
    error = fmt::format(
        "{} of {} parameters got no gradient in this backward: {}. If that is intended, set find_unused_parameters(true) in DDPOptions; otherwise find out why the loss does not depend on them.",
        names.size(),
        num_params,
        list_some(names));
  }
  fail_together(group, "DistributedDataParallel backward", error);
  TESSERA_INTERNAL_ASSERT(
      false, "some rank misses a gradient, but none says so");
}

void refuse_unknown(const Group& group, const std::vector<std::string>& names) {
  std::optional<std::string> error;
  if (!names.empty()) {
    error = fmt::format(
        "parameters of the module train, but their gradients are not averaged: {}. They were frozen, or did not exist, when the DistributedDataParallel was made. Make a new one after thawing or registering parameters.",
        list_some(names));
  }
  fail_together(group, "DistributedDataParallel backward", error);
}

std::vector<bool> used_anywhere(
    const Group& group,
    const std::vector<bool>& was_used) {
  std::vector<float> own(was_used.size());
  for (size_t i = 0; i < own.size(); ++i) {
    own[i] = was_used[i] ? 1 : 0;
  }
  const at::Tensor mask = at::empty(
      {static_cast<int64_t>(own.size())}, at::TensorOptions(at::kFloat));
  std::copy(own.begin(), own.end(), mask.data_ptr<float>());
  group.all_reduce(mask, ReduceOp::Max, "ddp: used parameters");
  const float* values = mask.const_data_ptr<float>();
  std::vector<bool> used(own.size());
  for (size_t i = 0; i < own.size(); ++i) {
    used[i] = values[i] != 0;
  }
  return used;
}

} // namespace tessera::ddp
