#include <tessera/ddp/join.h>
#include <tessera/error.h>

#include <ATen/ops/full.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <atomic>
#include <set>
#include <utility>

#include "ddp/open_joins.h"

namespace tessera {
namespace {

std::atomic<int> open_joins{0};

constexpr const char* kJoinLabel = "join: ranks with inputs";

at::Device device_of_first(const std::vector<Joinable*>& joinables) {
  if (joinables.empty()) {
    raise<c10::ValueError>(
        {.call = "Join"},
        "The join context manager requires at least one joinable. Pass what communicates: a DistributedDataParallel, a ZeroRedundancyOptimizer.");
  }
  return joinables.front()->join_device();
}

at::Tensor flag(double value, at::Device device) {
  return at::full({1}, value, at::TensorOptions(at::kFloat).device(device));
}

} // namespace

bool ddp::is_any_join_open() {
  return open_joins > 0;
}

void JoinHook::post_hook(bool /*is_last_joiner*/) {}

Joinable::~Joinable() = default;

Join::Join(std::vector<Joinable*> joinables, JoinOptions options)
    : joinables_(std::move(joinables)),
      options_(std::move(options)),
      device_(device_of_first(joinables_)) {
  group_ = joinables_.front()->join_process_group();
  std::set<const Joinable*> seen;
  for (Joinable* joinable : joinables_) {
    if (joinable->join_ != nullptr || !seen.insert(joinable).second) {
      raise<c10::ValueError>(
          {.call = "Join", .rank = group_.rank(), .world_size = group_.size()},
          "a joinable is given twice, or is in another Join. Close that Join first.");
    }
    const Group group = joinable->join_process_group();
    if (&group.impl() != &group_.impl()) {
      raise<c10::ValueError>(
          {.call = "Join", .rank = group_.rank(), .world_size = group_.size()},
          fmt::format(
              "Using join context manager with multiple process groups: \"{}\" and \"{}\". Make all joinables with the same group, or join them one inside the other.",
              group_.name(),
              group.name()));
    }
  }
  for (Joinable* joinable : joinables_) {
    hooks_.push_back(joinable->join_hook(options_.arguments()));
  }
  for (Joinable* joinable : joinables_) {
    joinable->join_ = this;
  }
  open_joins += options_.enable() ? 1 : 0;
}

Join::~Join() {
  let_go();
}

void Join::let_go() {
  if (!joinables_.empty() && options_.enable()) {
    --open_joins;
  }
  for (Joinable* joinable : joinables_) {
    joinable->join_ = nullptr;
  }
  joinables_.clear();
}

double Join::sum_over_ranks(double own) const {
  const at::Tensor sum = flag(own, device_);
  group_.all_reduce(sum, ReduceOp::Sum, kJoinLabel);
  return sum.item<double>();
}

void Join::close() {
  if (joinables_.empty()) {
    return;
  }
  if (!options_.enable()) {
    let_go();
    return;
  }
  notification_.wait();
  is_shadowing_ = true;
  bool is_last_joiner = true;
  while (sum_over_ranks(0) != 0) {
    if (options_.throw_on_early_termination()) {
      sum_over_ranks(1);
      let_go();
      raise(
          {.call = "Join", .rank = group_.rank(), .world_size = group_.size()},
          fmt::format("Rank {} exhausted all inputs.", group_.rank()));
    }
    is_last_joiner = false;
    for (const auto& hook : hooks_) {
      hook->main_hook();
    }
  }
  for (const auto& hook : hooks_) {
    hook->post_hook(is_last_joiner);
  }
  is_shadowing_ = false;
  let_go();
}

void Join::notify_join_context(Joinable& joinable) {
  Join* join = joinable.join_;
  if (join != nullptr && join->options_.enable() && !join->is_shadowing_ &&
      join->joinables_.front() == &joinable) {
    join->notify();
  }
}

void Join::notify() {
  notification_.wait();
  notification_ =
      group_.all_reduce_async(flag(1, device_), ReduceOp::Sum, kJoinLabel);
  if (options_.throw_on_early_termination() && sum_over_ranks(0) != 0) {
    raise(
        {.call = "Join", .rank = group_.rank(), .world_size = group_.size()},
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.");
  }
}

void Join::run(
    std::vector<Joinable*> joinables,
    const std::function<void()>& body,
    JoinOptions options) {
  Join context(std::move(joinables), std::move(options));
  body();
  context.close();
}

} // namespace tessera
