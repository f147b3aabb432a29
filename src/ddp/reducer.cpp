#include "ddp/reducer.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/group/group_impl.h"
#include "ddp/backward_agreement.h"

namespace tessera::ddp {
namespace {

constexpr const char* kCall = "DistributedDataParallel";
constexpr const char* kLabel = "ddp: gradients";

/// Never destroyed: models may die in static destructors.
struct Registry {
  std::mutex mutex;
  std::vector<Reducer*> reducers; // guarded by mutex
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
      buckets_(params_, options_.limits),
      was_used_(params_.size(), false) {
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

std::vector<Reducer*> Reducer::all() {
  const std::scoped_lock lock(registry().mutex);
  return registry().reducers;
}

bool Reducer::reduces(const at::Tensor& param) const {
  return std::any_of(params_.begin(), params_.end(), [&](const auto& mine) {
    return mine.tensor.is_same(param);
  });
}

bool Reducer::holds(const at::Tensor& tensor) const {
  bool found = false;
  for_each_bucket([&](const at::Tensor& flat) {
    found = found || (tensor.has_storage() && tensor.is_alias_of(flat));
  });
  return found;
}

bool Reducer::moves_data() const {
  return group_.size() > 1 || hook_ || options_.gradient_as_bucket_view;
}

void Reducer::on_gradient(size_t param) {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard no_grad;
  was_used_[param] = true;
  if (!is_reducing_) {
    if (!syncs_) {
      averaged_.set_counting(false); // a step would take this rank's alone
      return;
    }
    begin();
  }
  GradientBuckets::Slot& slot = buckets_.slot(param);
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
  --buckets_.of(param).num_missing;
  start_ready_buckets();
}

void Reducer::begin() {
  on_begin_();
  buckets_.ensure_memory(moves_data());
  is_reducing_ = true;
  libtorch::at_end_of_backward(
      [this] { end(); },
      [this] {
        const std::scoped_lock lock(mutex_);
        reset();
      });
}

void Reducer::fill(size_t param) {
  if (is_shadow_) {
    buckets_.slot(param).view.zero_();
  } else {
    buckets_.fill(param, options_.gradient_as_bucket_view);
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
  GradientBuckets::Bucket& bucket = buckets_[index];
  if (hook_) {
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> params;
    for (const size_t param : bucket.params) {
      gradients.push_back(buckets_.slot(param).view);
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
  buckets_.ensure_memory(moves_data());
  is_shadow_ = true;
  reduce_rest();
}

void Reducer::reduce_accumulated() {
  const std::scoped_lock lock(mutex_);
  const at::NoGradGuard no_grad;
  on_begin_();
  buckets_.ensure_memory(moves_data());
  is_reducing_ = true;
  // A rank without any gradient had no inputs, so it misses none.
  const bool has_any =
      std::find(was_used_.begin(), was_used_.end(), true) != was_used_.end();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (was_used_[i] || !has_any) {
      buckets_.slot(i).is_ready = true;
      ready_order_.push_back(i);
      if (moves_data()) {
        fill(i);
      }
      --buckets_.of(i).num_missing;
    }
  }
  reduce_rest();
}

/// Handles everything that backward did not reach.
void Reducer::reduce_rest() try {
  const at::NoGradGuard no_grad;
  int64_t num_missing = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!buckets_.slot(i).is_ready) {
      num_missing += is_shadow_ ? 0 : 1;
      if (moves_data()) {
        fill(i);
      }
      --buckets_.of(i).num_missing;
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
    for (const auto& bucket : buckets_.all()) {
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

BackwardReport Reducer::report(int64_t num_missing) const {
  const engine::StepsMade steps = averaged_.steps();
  return {
      .num_missing = num_missing,
      .unknown = find_unknown_(),
      .has_inputs = !is_shadow_,
      .num_forwards = num_forwards_,
      .num_steps = steps.since_restart,
      .stepped = num_reductions_ == 0 ? 0 : steps.digest()};
}

void Reducer::settle(int64_t num_missing) {
  const BackwardReport mine = report(num_missing);
  averaged_.restart_count(); // not after an exception that other ranks lack
  averaged_.set_counting(true);
  if (hook_) {
    fail_if_any_hook_threw(group_, control_, failure_);
  }
  // While a step is captured, ranks exchange nothing on the host: each has all
  // gradients, or its capture fails, and then no rank captures the step.
  const bool is_recorded = libtorch::is_recorded_here();
  std::optional<BackwardExchange> exchange;
  if (group_.size() == 1) {
    refuse_unknown_alone(mine);
  } else if (is_recorded) {
    check_recorded(mine, missing_names());
  } else {
    exchange.emplace(group_, mine);
  }
  const std::vector<at::Tensor> results = wait_for_buckets();
  if (hook_) {
    fail_if_any_hook_threw(group_, control_, failure_);
  }
  std::vector<bool> used(params_.size(), true);
  if (exchange ? exchange->any_missing() : num_missing > 0) {
    if (!options_.tolerates_unused) {
      refuse_missing(group_, missing_names(), params_.size());
    }
    used = group_.size() == 1 ? was_used_ : used_anywhere(group_, was_used_);
  }
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (buckets_[i].reduction && !results[i].is_same(buckets_[i].flat)) {
      buckets_[i].flat.copy_(results[i].reshape({-1}));
    }
  }
  if (!is_shadow_ && moves_data()) {
    buckets_.write_back(used, options_.gradient_as_bucket_view);
  }
  num_reductions_ += is_recorded ? 0 : 1;
  if (!has_rebuilt_ && num_reductions_ >= options_.rebuilds_after) {
    rebuild_buckets();
  }
  buckets_.empty();
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

std::vector<std::string> Reducer::missing_names() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!buckets_.slot(i).is_ready && !is_shadow_) {
      names.push_back(params_[i].name);
    }
  }
  return names;
}

void Reducer::rebuild_buckets() {
  std::vector<int64_t> order(ready_order_.begin(), ready_order_.end());
  for (size_t i = params_.size(); i-- > 0;) {
    if (!buckets_.slot(i).is_ready) {
      order.push_back(static_cast<int64_t>(i));
    }
  }
  const at::Tensor wire = at::empty(
      {static_cast<int64_t>(order.size())}, at::TensorOptions(at::kLong));
  std::copy(order.begin(), order.end(), wire.data_ptr<int64_t>());
  group_.broadcast(wire, 0, "ddp: order of gradients");
  const int64_t* values = wire.const_data_ptr<int64_t>();
  buckets_.rearrange(
      {values, values + order.size()},
      moves_data(),
      options_.gradient_as_bucket_view);
  has_rebuilt_ = true;
}

/// Called after an exception. Collectives in flight keep their own memory.
void Reducer::reset() {
  become_idle();
  buckets_.drop_memory();
}

} // namespace tessera::ddp
