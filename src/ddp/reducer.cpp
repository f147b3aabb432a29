#include "ddp/reducer.h"

#include <tessera/comm/agree.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "comm/group/all_or_none.h"
#include "comm/group/group_impl.h"
#include "libtorch/alias.h"

namespace tessera::ddp {
namespace {

constexpr const char* kCall = "DistributedDataParallel";
constexpr const char* kLabel = "ddp: gradients";
constexpr size_t kMaxNamed = 8;

/// Never destroyed: models may die in static destructors.
struct Registry {
  std::mutex mutex;
  std::vector<const Reducer*> reducers; // guarded by mutex
};
Registry& registry() {
  static auto& instance = *new Registry;
  return instance;
}

std::vector<at::Tensor> tensors_of(const std::vector<NamedParam>& params) {
  std::vector<at::Tensor> tensors;
  for (const NamedParam& param : params) {
    tensors.push_back(param.tensor);
  }
  return tensors;
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

std::string list_some(const std::vector<std::string>& names) {
  std::vector<std::string> quoted;
  for (size_t i = 0; i < std::min(names.size(), kMaxNamed); ++i) {
    quoted.push_back('"' + names[i] + '"');
  }
  return fmt::format(
      "{}{}", fmt::join(quoted, ", "), names.size() > kMaxNamed ? ", ..." : "");
}

} // namespace

Reducer::Reducer(
    Group group,
    std::vector<NamedParam> params,
    ReducerOptions options,
    std::function<void()> on_begin,
    std::function<std::vector<std::string>()> find_unknown)
    : group_(std::move(group)),
      params_(std::move(params)),
      options_(options),
      on_begin_(std::move(on_begin)),
      find_unknown_(std::move(find_unknown)),
      averaged_(tensors_of(params_)),
      slots_(params_.size()),
      was_used_(params_.size(), false) {
  // Backward usually reaches the last parameters first.
  std::vector<size_t> order(params_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  make_buckets(order);
  for (size_t i = 0; i < params_.size(); ++i) {
    hooks_.emplace_back(params_[i].tensor, [this, i] { on_gradient(i); });
  }
  const std::scoped_lock lock(registry().mutex);
  registry().reducers.push_back(this);
}

Reducer::~Reducer() {
  const std::scoped_lock lock(registry().mutex);
  std::erase(registry().reducers, this);
}

std::vector<const Reducer*> Reducer::all() {
  const std::scoped_lock lock(registry().mutex);
  return registry().reducers;
}

bool Reducer::reduces(const at::Tensor& param) const {
  return std::any_of(params_.begin(), params_.end(), [&](const auto& mine) {
    return mine.tensor.is_same(param);
  });
}

bool Reducer::moves_data() const {
  return group_.size() > 1 || hook_ || options_.gradient_as_bucket_view;
}

void Reducer::make_buckets(const std::vector<size_t>& order) {
  buckets_.clear();
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  std::vector<GradientSize> sizes;
  for (const size_t param : order) {
    const at::Tensor& tensor = params_[param].tensor;
    const std::pair kind(tensor.scalar_type(), tensor.device());
    const auto found = std::find(kinds.begin(), kinds.end(), kind);
    sizes.push_back(
        {.bytes = static_cast<int64_t>(tensor.nbytes()),
         .kind = found - kinds.begin()});
    if (found == kinds.end()) {
      kinds.push_back(kind);
    }
  }
  for (const auto& positions : pack_buckets(sizes, options_.limits)) {
    Bucket& bucket = buckets_.emplace_back();
    for (const size_t position : positions) {
      bucket.params.push_back(order[position]);
    }
  }
  has_memory_ = false;
}

void Reducer::ensure_memory() {
  if (has_memory_) {
    return;
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    Bucket& bucket = buckets_[i];
    int64_t numel = 0;
    for (const size_t param : bucket.params) {
      numel += params_[param].tensor.numel();
    }
    bucket.num_missing = bucket.params.size();
    bucket.reduction = nullptr;
    if (moves_data()) {
      bucket.flat = at::empty(
          {numel},
          params_[bucket.params.front()].tensor.options().requires_grad(false));
    }
    int64_t begin = 0;
    for (const size_t param : bucket.params) {
      const at::Tensor& tensor = params_[param].tensor;
      slots_[param] = {.bucket = i};
      if (bucket.flat.defined()) {
        slots_[param].view =
            engine::alias_of(bucket.flat, tensor.sizes(), begin);
      }
      begin += tensor.numel();
    }
  }
  has_memory_ = true;
}

void Reducer::on_gradient(size_t param) {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard no_grad;
  was_used_[param] = true;
  if (!is_reducing_) {
    if (!syncs_) {
      return;
    }
    begin();
  }
  Slot& slot = slots_[param];
  if (slot.is_ready) {
    raise(
        {.call = "backward",
         .rank = group_.rank(),
         .world_size = group_.size(),
         .parameter = params_[param].name},
        "its gradient came twice in one backward of a DistributedDataParallel: a backward inside the backward uses it again. Use tessera::recompute, or reduce under no_sync() and once more.");
  }
  slot.is_ready = true;
  ready_order_.push_back(param);
  if (moves_data()) {
    fill(param);
  }
  --buckets_[slot.bucket].num_missing;
  start_ready_buckets();
}

void Reducer::begin() {
  on_begin_();
  ensure_memory();
  is_reducing_ = true;
  engine::at_end_of_backward(
      [this] { end(); },
      [this] {
        const std::scoped_lock lock(mutex_);
        reset();
      });
}

void Reducer::fill(size_t param) {
  const Slot& slot = slots_[param];
  at::Tensor& gradient = params_[param].tensor.mutable_grad();
  if (is_shadow_ || !gradient.defined()) {
    slot.view.zero_();
    return;
  }
  const bool is_there =
      gradient.layout() == at::kStrided && gradient.is_alias_of(slot.view);
  if (!is_there) {
    slot.view.copy_(
        gradient.layout() == at::kStrided ? gradient : gradient.to_dense());
  }
  if (options_.gradient_as_bucket_view && !is_there) {
    gradient = slot.view;
  }
}

void Reducer::start_ready_buckets() {
  while (num_started_ < buckets_.size() &&
         buckets_[num_started_].num_missing == 0) {
    start(num_started_);
    ++num_started_;
  }
}

void Reducer::start(size_t index) {
  Bucket& bucket = buckets_[index];
  if (hook_) {
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> params;
    for (const size_t param : bucket.params) {
      gradients.push_back(slots_[param].view);
      params.push_back(params_[param].tensor);
    }
    if (failure_) {
      return; // the other ranks learn of it when this backward ends
    }
    GradBucket shown(
        index,
        index + 1 == buckets_.size(),
        bucket.flat,
        std::move(gradients),
        std::move(params));
    try {
      bucket.reduction = hook_(shown);
      if (!bucket.reduction) {
        refuse_result(index, "nothing to wait for");
      }
    } catch (...) {
      failure_ = std::current_exception();
    }
    return;
  }
  if (group_.size() > 1) {
    auto work = std::make_shared<Work>(
        group_.all_reduce_async(bucket.flat, ReduceOp::Avg, kLabel));
    bucket.reduction = [work, flat = bucket.flat] {
      work->wait();
      return flat;
    };
  }
}

void Reducer::end() {
  const std::scoped_lock lock(mutex_);
  reduce_rest();
}

void Reducer::shadow() {
  const std::scoped_lock lock(mutex_);
  ensure_memory();
  is_shadow_ = true;
  reduce_rest();
}

void Reducer::reduce_accumulated() {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard no_grad;
  on_begin_();
  ensure_memory();
  is_reducing_ = true;
  // A rank without any gradient had no inputs, so it misses none.
  const bool has_any =
      std::find(was_used_.begin(), was_used_.end(), true) != was_used_.end();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (was_used_[i] || !has_any) {
      slots_[i].is_ready = true;
      ready_order_.push_back(i);
      if (moves_data()) {
        fill(i);
      }
      --buckets_[slots_[i].bucket].num_missing;
    }
  }
  reduce_rest();
}

/// Handles everything that backward did not reach.
void Reducer::reduce_rest() try {
  const at::NoGradGuard no_grad;
  int64_t num_missing = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!slots_[i].is_ready) {
      num_missing += is_shadow_ ? 0 : 1;
      if (moves_data()) {
        fill(i);
      }
      --buckets_[slots_[i].bucket].num_missing;
    }
  }
  start_ready_buckets();
  settle(num_missing);
} catch (...) {
  reset();
  throw;
}

/// Waits for all buckets; what a hook throws here is kept in failure_.
std::vector<at::Tensor> Reducer::wait_for_buckets() {
  std::vector<at::Tensor> results;
  try {
    for (const Bucket& bucket : buckets_) {
      results.push_back(bucket.reduction ? bucket.reduction() : at::Tensor());
    }
  } catch (const ThrownOnAllRanks& thrown) {
    std::rethrow_exception(thrown.error);
  } catch (...) {
    if (!hook_) {
      throw;
    }
    failure_ = std::current_exception();
    // Other ranks may wait for collectives that this hook did not start.
    group_.impl().give_up("a communication hook threw while it was waited for");
    return results;
  }
  try {
    for (size_t i = 0; hook_ && i < results.size(); ++i) {
      check_result(i, results[i]);
    }
  } catch (...) {
    failure_ = std::current_exception();
  }
  return results;
}

/// Throws on every rank if a hook threw on any. Collective over the control
/// group.
void Reducer::fail_if_any_hook_threw() {
  const at::Tensor mine = at::empty({1}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = failure_ ? 1 : 0;
  control_.all_reduce(mine, ReduceOp::Sum, "ddp: communication hooks");
  const int64_t num_failed = mine.const_data_ptr<int64_t>()[0];
  if (num_failed == 0) {
    return;
  }
  if (num_failed < control_.size()) { // the others made its collectives
    group_.impl().give_up("a communication hook threw on some ranks");
  }
  const auto failure = std::exchange(failure_, nullptr);
  const bool is_lost = failure && is_dist_error(failure);
  comm::all_or_none({control_}, "communication hook", [&] {
    if (failure && !is_lost) { // otherwise it follows from another rank's error
      std::rethrow_exception(failure);
    }
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
  raise<PeerLostError>(
      {.call = kCall, .rank = group_.rank(), .world_size = group_.size()},
      "another rank lost a peer in a communication hook; see its own error.");
}

/// `by_rank` has three numbers per rank; the last is its number of forwards.
void Reducer::compare_forwards(const int64_t* by_rank) const {
  int first = -1;
  for (int rank = 0; rank < group_.size(); ++rank) {
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
           .rank = group_.rank(),
           .world_size = group_.size()},
          fmt::format(
              "since the last reduction rank {} made {} forwards through the handle, rank {} made {}, so these would be gradients of different steps. Either a backward reached no parameter on one of them, or one of them called the handle where the others did not: evaluate under torch::NoGradGuard or with eval().",
              group_.global_ranks()[static_cast<size_t>(first)],
              by_rank[3 * first + 2],
              group_.global_ranks()[static_cast<size_t>(rank)],
              theirs));
    }
  }
}

void Reducer::settle(int64_t num_missing) {
  const std::vector<std::string> unknown = find_unknown_();
  const at::Tensor mine = at::empty({3}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = num_missing;
  mine.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(unknown.size());
  mine.mutable_data_ptr<int64_t>()[2] = is_shadow_ ? -1 : num_forwards_;
  const at::Tensor all = at::empty({group_.size(), 3}, at::kLong);
  if (hook_) {
    fail_if_any_hook_threw();
  }
  auto told = group_.all_gather_into_async(
      all, mine, "ddp: parameters without gradient");
  const std::vector<at::Tensor> results = wait_for_buckets();
  if (hook_) {
    fail_if_any_hook_threw();
  }
  told.wait();
  const int64_t* counts = all.const_data_ptr<int64_t>();
  compare_forwards(counts);
  bool any_missing = false;
  bool any_unknown = false;
  for (int rank = 0; rank < group_.size(); ++rank) {
    any_missing = any_missing || counts[3 * rank] != 0;
    any_unknown = any_unknown || counts[3 * rank + 1] != 0;
  }
  if (any_unknown) {
    refuse_unknown(unknown);
  }
  std::vector<bool> used(params_.size(), true);
  if (any_missing) {
    if (!options_.tolerates_unused) {
      refuse_missing();
    }
    used = used_anywhere();
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].reduction && !results[i].is_same(buckets_[i].flat)) {
      buckets_[i].flat.copy_(results[i].reshape({-1}));
    }
  }
  if (!is_shadow_ && moves_data()) {
    write_back(used);
  }
  if (!has_rebuilt_ && ++num_reductions_ >= options_.rebuilds_after) {
    rebuild_buckets();
  }
  for (Bucket& bucket : buckets_) {
    bucket.num_missing = bucket.params.size();
    bucket.reduction = nullptr;
  }
  for (Slot& slot : slots_) {
    slot.is_ready = false;
  }
  was_used_.assign(params_.size(), false);
  become_idle();
}

/// A hook has put the gradients into another tensor.
void Reducer::check_result(size_t index, const at::Tensor& result) const {
  if (!result.defined()) {
    refuse_result(index, "an undefined tensor");
  }
  if (result.numel() != buckets_[index].flat.numel()) {
    refuse_result(index, fmt::format("{} elements", result.numel()));
  }
}

void Reducer::refuse_result(size_t index, const std::string& what) const {
  raise<c10::ValueError>(
      {.call = kCall, .rank = group_.rank(), .world_size = group_.size()},
      fmt::format(
          "the communication hook returned {} for bucket {} of {} elements. Return a function that gives a tensor like its buffer().",
          what,
          index,
          buckets_[index].flat.numel()));
}

void Reducer::become_idle() {
  is_reducing_ = false;
  num_forwards_ = 0;
  failure_ = nullptr;
  is_shadow_ = false;
  num_started_ = 0;
  ready_order_.clear();
}

void Reducer::refuse_missing() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!slots_[i].is_ready && !is_shadow_) {
      names.push_back(params_[i].name);
    }
  }
  std::optional<std::string> error;
  if (!names.empty()) {
    error = fmt::format(
        "{} of {} parameters got no gradient in this backward: {}. If that is intended, set find_unused_parameters(true) in DDPOptions; otherwise find out why the loss does not depend on them.",
        names.size(),
        params_.size(),
        list_some(names));
  }
  fail_together(group_, "DistributedDataParallel backward", error);
  TESSERA_INTERNAL_ASSERT(
      false, "some rank misses a gradient, but none says so");
}

/// Throws on every rank if any rank passes a name.
void Reducer::refuse_unknown(const std::vector<std::string>& names) const {
  std::optional<std::string> error;
  if (!names.empty()) {
    error = fmt::format(
        "parameters of the module train, but their gradients are not averaged: {}. They were frozen, or did not exist, when the DistributedDataParallel was made. Make a new one after thawing or registering parameters.",
        list_some(names));
  }
  fail_together(group_, "DistributedDataParallel backward", error);
}

std::vector<bool> Reducer::used_anywhere() const {
  std::vector<float> own(params_.size());
  for (size_t i = 0; i < own.size(); ++i) {
    own[i] = was_used_[i] ? 1 : 0;
  }
  const at::Tensor mask = at::empty(
      {static_cast<int64_t>(own.size())}, at::TensorOptions(at::kFloat));
  std::copy(own.begin(), own.end(), mask.data_ptr<float>());
  group_.all_reduce(mask, ReduceOp::Max, "ddp: used parameters");
  const float* values = mask.const_data_ptr<float>();
  std::vector<bool> used(own.size());
  for (size_t i = 0; i < own.size(); ++i) {
    used[i] = values[i] != 0;
  }
  return used;
}

void Reducer::write_back(const std::vector<bool>& used) {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!used[i]) {
      continue;
    }
    at::Tensor& gradient = params_[i].tensor.mutable_grad();
    if (options_.gradient_as_bucket_view) {
      gradient = slots_[i].view;
    } else if (gradient.defined() && gradient.layout() == at::kStrided) {
      gradient.detach().copy_(slots_[i].view);
    } else {
      gradient = slots_[i].view.clone();
    }
  }
}

void Reducer::rebuild_buckets() {
  std::vector<int64_t> order(ready_order_.begin(), ready_order_.end());
  for (size_t i = params_.size(); i-- > 0;) {
    if (!slots_[i].is_ready) {
      order.push_back(static_cast<int64_t>(i));
    }
  }
  const at::Tensor wire = at::empty(
      {static_cast<int64_t>(order.size())}, at::TensorOptions(at::kLong));
  std::copy(order.begin(), order.end(), wire.data_ptr<int64_t>());
  group_.broadcast(wire, 0, "ddp: order of gradients");
  const int64_t* values = wire.const_data_ptr<int64_t>();
  std::vector<at::Tensor> old_views;
  for (const Slot& slot : slots_) {
    old_views.push_back(slot.view);
  }
  make_buckets(std::vector<size_t>(values, values + order.size()));
  ensure_memory();
  if (options_.gradient_as_bucket_view) {
    for (size_t i = 0; i < params_.size(); ++i) {
      at::Tensor& gradient = params_[i].tensor.mutable_grad();
      if (gradient.defined() && gradient.is_alias_of(old_views[i])) {
        slots_[i].view.copy_(gradient);
        gradient = slots_[i].view;
      }
    }
  }
  has_rebuilt_ = true;
}

/// Called after an exception. Collectives in flight keep their own memory.
void Reducer::reset() {
  become_idle();
  has_memory_ = false;
}

} // namespace tessera::ddp
