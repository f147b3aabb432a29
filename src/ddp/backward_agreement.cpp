#include "ddp/backward_agreement.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "comm/diagnostics/call.h"
#include "comm/group/all_or_none.h"
#include "comm/group/group_impl.h"

namespace tessera::ddp {
namespace {

constexpr const char* kBackward = "DistributedDataParallel backward";
constexpr size_t kMaxNamed = 8;

/// The numbers of a report.
constexpr int kMissing = 0;
constexpr int kUnknown = 1;
constexpr int kHasInputs = 2;
constexpr int kForwards = 3;
constexpr int kSteps = 4;
constexpr int kStepped = 5;
constexpr int kNumFields = 6;

std::string list_some(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (size_t i = 0; i < std::min(names.size(), kMaxNamed); ++i) {
    quoted.push_back('"' + names[i] + '"');
  }
  return fmt::format(
      "{}{}", fmt::join(quoted, ", "), names.size() > kMaxNamed ? ", ..." : "");
}

std::optional<std::string> objection_to_unknown(
    const std::vector<std::string>& names) {
  if (names.empty()) {
    return std::nullopt;
  }
  return fmt::format(
      "parameters of the module train, but their gradients are not averaged: {}. They were frozen, or did not exist, when the DistributedDataParallel was made. Make a new one after thawing or registering parameters.",
      list_some(names));
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

BackwardExchange::BackwardExchange(
    const Group& group,
    const BackwardReport& mine)
    : group_(group),
      unknown_(mine.unknown),
      all_(at::empty({group.size(), kNumFields}, at::kLong)) {
  const at::Tensor own = at::empty({kNumFields}, at::kLong);
  auto* numbers = own.mutable_data_ptr<int64_t>();
  numbers[kMissing] = mine.num_missing;
  numbers[kUnknown] = static_cast<int64_t>(unknown_.size());
  numbers[kHasInputs] = mine.has_inputs ? 1 : 0;
  numbers[kForwards] = mine.num_forwards;
  numbers[kSteps] = mine.num_steps;
  numbers[kStepped] = static_cast<int64_t>(mine.stepped);
  told_ = group_.all_gather_into_async(
      all_, own, "ddp: parameters without gradient");
}

int64_t BackwardExchange::reported(int rank, int field) const {
  return all_.const_data_ptr<int64_t>()[kNumFields * rank + field];
}

bool BackwardExchange::any_missing() {
  told_.wait();
  compare_progress();
  bool any_missing = false;
  bool any_unknown = false;
  for (int rank = 0; rank < group_.size(); ++rank) {
    any_missing = any_missing || reported(rank, kMissing) != 0;
    any_unknown = any_unknown || reported(rank, kUnknown) != 0;
  }
  if (any_unknown) {
    fail_together(group_, kBackward, objection_to_unknown(unknown_));
  }
  return any_missing;
}

/// Each rank has the same table, so all throw or none.
void BackwardExchange::compare_progress() const {
  int first = -1; // that has inputs
  std::map<int64_t, int> first_of; // by what they have stepped
  bool differs = false;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (reported(rank, kHasInputs) == 0) {
      continue;
    }
    first = first < 0 ? rank : first;
    const int alike =
        first_of.try_emplace(reported(rank, kStepped), rank).first->second;
    differs = differs ||
        reported(rank, kForwards) != reported(first, kForwards) ||
        reported(rank, kSteps) != reported(alike, kSteps);
  }
  if (!differs) {
    return;
  }
  std::vector<std::string> texts;
  for (int rank = 0; rank < group_.size(); ++rank) {
    texts.push_back(progress_of(rank));
  }
  raise<DisagreementError>(
      {.call = kBackward, .rank = group_.rank(), .world_size = group_.size()},
      fmt::format(
          "these would be gradients of different steps. Since the last reduction the ranks made:{}\n  A rank that made more had a backward that reached no parameter, or left one out: its loss must depend on the model in every step. Or it alone called the handle, or stepped an optimizer: evaluate under torch::NoGradGuard or with eval(), and step on all ranks.",
          comm::list_by_text(texts, group_.global_ranks())));
}

std::string BackwardExchange::progress_of(int rank) const {
  if (reported(rank, kHasInputs) == 0) {
    return "nothing, being without inputs under Join";
  }
  const int64_t forwards = reported(rank, kForwards);
  const int64_t steps = reported(rank, kSteps);
  return fmt::format(
      "{} forward{} through the handle, {} step{} of optimizers",
      forwards,
      forwards == 1 ? "" : "s",
      steps,
      steps == 1 ? "" : "s");
}

void refuse_unknown_alone(const BackwardReport& mine) {
  if (const auto objection = objection_to_unknown(mine.unknown)) {
    raise({.call = kBackward}, *objection);
  }
}

void check_recorded(
    const BackwardReport& mine,
    const std::vector<std::string>& missing) {
  if (mine.num_missing > 0) {
    raise(
        {.call = kBackward},
        fmt::format(
            "{} parameters got no gradient: {}. The ranks tell each other about such parameters on the host, which a captured step cannot. Let the loss depend on all parameters, or freeze the others before the DistributedDataParallel is made.",
            mine.num_missing,
            list_some(missing)));
  }
  refuse_unknown_alone(mine);
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
  fail_together(group, kBackward, error);
  TESSERA_INTERNAL_ASSERT(
      false, "some rank misses a gradient, but none says so");
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
