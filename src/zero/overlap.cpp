#include "zero/overlap.h"

#include <tessera/error.h>
#include <tessera/zero/ddp_zero_hook.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "comm/group/all_or_none.h"
#include "ddp/reducer.h"
#include "zero/bucket_assignment.h"

namespace tessera {
namespace {

using Overlap = ZeroRedundancyOptimizer::Overlap;

constexpr const char* kHook = "hook_with_zero_step";
constexpr const char* kStepInBackward =
    "ZeroRedundancyOptimizer, step in backward";
constexpr const char* kParamsLabel = "zero: new parameters";

ErrorSite site_of(const Group& group, const char* call) {
  return {.call = call, .rank = group.rank(), .world_size = group.size()};
}

/// The averaged gradients of a bucket's parameters from `begin` on, in their
/// shapes.
std::vector<at::Tensor> gradients_of(
    const GradBucket& bucket,
    const at::Tensor& result,
    size_t begin,
    size_t count) {
  const auto& own = bucket.gradients();
  if (result.is_same(bucket.buffer())) {
    return {own.begin() + begin, own.begin() + begin + count};
  }
  std::vector<at::Tensor> gradients;
  int64_t offset = 0;
  for (size_t i = 0; i < begin + count; ++i) {
    if (i >= begin) {
      gradients.push_back(result.view({-1})
                              .narrow(0, offset, own[i].numel())
                              .view(own[i].sizes()));
    }
    offset += own[i].numel();
  }
  return gradients;
}

/// Module::to() moves parameters out of their buckets.
bool lies_in_flat(
    const std::vector<at::Tensor>& params,
    const at::Tensor& flat) {
  return std::all_of(params.begin(), params.end(), [&](const auto& param) {
    return param.is_alias_of(flat);
  });
}

} // namespace

CommHook Overlap::make_hook(ZeroRedundancyOptimizer& zero, Wiring wiring) {
  if (zero.overlap_ == nullptr) {
    raise<c10::ValueError>(
        site_of(zero.group_, kHook),
        "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook properly. Pass ZeroOptions().overlap_with_ddp(true).");
  }
  zero.overlap_->connect(std::move(wiring));
  return [overlap = zero.overlap_](GradBucket& bucket) {
    return on_bucket(overlap, bucket);
  };
}

void Overlap::connect(Wiring wiring) {
  group_ = zero_->join_process_group();
  if (wiring_.hook) {
    raise<c10::ValueError>(
        site_of(group_, kHook),
        "this ZeroRedundancyOptimizer is already used by a hook. Make one for each DistributedDataParallel.");
  }
  if (wiring.hook == nullptr) {
    raise<c10::ValueError>(
        site_of(group_, kHook),
        "there is no hook that averages. Pass allreduce_hook(group).");
  }
  if (wiring.ddp->join_process_group().global_ranks() !=
      group_.global_ranks()) {
    raise<c10::ValueError>(
        site_of(group_, kHook),
        "the DistributedDataParallel and the ZeroRedundancyOptimizer have different ranks. Make both with the same process_group.");
  }
  wiring_ = std::move(wiring);
}

CommFuture Overlap::on_bucket(
    const std::shared_ptr<Overlap>& overlap,
    GradBucket& bucket) {
  Overlap& self = *overlap;
  if (self.zero_ == nullptr) {
    raise(
        site_of(self.group_, kHook),
        "the ZeroRedundancyOptimizer that this hook steps is gone. Keep it as long as the model is trained, or make a new DistributedDataParallel.");
  }
  if (bucket.index() == 0) {
    self.begin_backward();
  }
  CommFuture reduction = self.wiring_.hook(bucket);
  if (self.phase_ != Phase::Ready) {
    self.record(bucket);
    return reduction;
  }
  self.in_flight_.push_back({std::move(reduction), bucket, {}});
  const size_t index = bucket.index();
  if (self.wiring_.is_interleaved) {
    self.step_through(index);
  }
  return [overlap, index] { return overlap->finish(index); };
}

/// Drops what a backward that threw left behind.
void Overlap::begin_backward() {
  in_flight_.clear();
  num_stepped_ = 0;
  sends_.clear();
  error_ = nullptr;
  if (phase_ == Phase::Seen) {
    set_up();
  }
  if (phase_ != Phase::Ready) {
    buckets_.clear();
  }
}

void Overlap::record(const GradBucket& bucket) {
  if (!wiring_.ddp->has_rebuilt_buckets()) {
    return;
  }
  buckets_.push_back({bucket.parameters(), {}});
  if (bucket.is_last()) {
    phase_ = Phase::Seen;
  }
}

void Overlap::set_up() {
  std::vector<at::Tensor> own;
  comm::all_or_none({group_}, kHook, [&] {
    check_params();
    divide_buckets();
    for (const Bucket& bucket : buckets_) {
      for (const Part& part : bucket.parts) {
        if (part.rank == group_.rank()) {
          own.insert(own.end(), part.params.begin(), part.params.end());
        }
      }
    }
    zero_->make_local_optimizer(own);
  });
  for (Bucket& bucket : buckets_) {
    for (Part& part : bucket.parts) {
      move_into_flat(part);
    }
  }
  phase_ = Phase::Ready;
}

/// Checks that both have the same trainable parameters.
void Overlap::check_params() const {
  std::unordered_set<const c10::TensorImpl*> reduced;
  for (const Bucket& bucket : buckets_) {
    for (const at::Tensor& param : bucket.params) {
      reduced.insert(param.unsafeGetTensorImpl());
    }
  }
  const auto& params = zero_->param_groups().front().params();
  for (size_t i = 0; i < params.size(); ++i) {
    if (reduced.erase(params[i].unsafeGetTensorImpl()) == 0 &&
        params[i].requires_grad()) {
      raise<c10::ValueError>(
          site_of(group_, kHook),
          fmt::format(
              "parameter {} of the ZeroRedundancyOptimizer is not one that the DistributedDataParallel reduces, so it would never be stepped. Make both of the same model, and freeze parameters before.",
              i));
    }
  }
  if (!reduced.empty()) {
    raise<c10::ValueError>(
        site_of(group_, kHook),
        fmt::format(
            "{} parameters of the DistributedDataParallel are not in the ZeroRedundancyOptimizer, so nobody would step them. Pass all of the model's parameters to it.",
            reduced.size()));
  }
}

void Overlap::divide_buckets() {
  zero::BucketSizes sizes;
  for (const Bucket& bucket : buckets_) {
    auto& numels = sizes.emplace_back();
    for (const at::Tensor& param : bucket.params) {
      numels.push_back(param.numel());
    }
  }
  const auto pieces = wiring_.shard_buckets
      ? zero::assign_even_buckets(sizes, group_.size())
      : zero::assign_whole_buckets(sizes, group_.size());
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const auto& params = buckets_[i].params;
    buckets_[i].parts.clear();
    for (const zero::BucketPiece& piece : pieces[i]) {
      buckets_[i].parts.push_back(
          {piece.rank,
           piece.begin,
           {params.begin() + piece.begin, params.begin() + piece.end},
           {}});
    }
  }
}

/// The parameters lie one after another in one tensor, which is sent as it is.
void Overlap::move_into_flat(Part& part) {
  const at::NoGradGuard no_grad;
  int64_t numel = 0;
  for (const at::Tensor& param : part.params) {
    numel += param.numel();
  }
  part.flat =
      at::empty({numel}, part.params.front().options().requires_grad(false));
  int64_t begin = 0;
  for (const at::Tensor& param : part.params) {
    const at::Tensor old = param.detach();
    const at::Tensor place = old.is_non_overlapping_and_dense()
        ? part.flat.as_strided(old.sizes(), old.strides(), begin)
        : part.flat.narrow(0, begin, old.numel()).view(old.sizes());
    place.copy_(old);
    param.set_data(place);
    begin += old.numel();
  }
}

void Overlap::step_through(size_t num_buckets) {
  for (; num_stepped_ < num_buckets; ++num_stepped_) {
    InFlight& bucket = in_flight_[num_stepped_];
    bucket.result = std::exchange(bucket.reduction, nullptr)();
    for (Part& part : buckets_[num_stepped_].parts) {
      if (!lies_in_flat(part.params, part.flat)) {
        move_into_flat(part);
      }
      step(part, bucket);
    }
  }
}

void Overlap::step(Part& part, const InFlight& bucket) {
  try {
    check_trainable(part);
    if (part.rank == group_.rank()) {
      zero_->step_part(
          part.params,
          gradients_of(
              bucket.bucket, bucket.result, part.begin, part.params.size()));
    }
  } catch (...) {
    // The others wait for this rank's collectives: see finish_sends().
    error_ = error_ ? error_ : std::current_exception();
  }
  if (group_.size() > 1) {
    sends_.push_back(
        group_.broadcast_async(part.flat, part.rank, kParamsLabel));
  }
  // Neither fused kernels nor communication bump the versions of tensors.
  for (const at::Tensor& param : part.params) {
    param.unsafeGetTensorImpl()->bump_version();
  }
}

void Overlap::check_trainable(const Part& part) const {
  for (const at::Tensor& param : part.params) {
    if (!param.requires_grad()) {
      raise(
          site_of(group_, kStepInBackward),
          fmt::format(
              "a parameter of shape {} was frozen, which ZeroRedundancyOptimizer does not support with `overlap_with_ddp=True`. Freeze parameters before DistributedDataParallel is made, or call step() yourself, without overlap.",
              param.sizes().vec()));
    }
  }
}

at::Tensor Overlap::finish(size_t bucket) {
  step_through(bucket + 1);
  at::Tensor result = std::move(in_flight_[bucket].result);
  if (bucket + 1 == buckets_.size()) {
    in_flight_.clear();
    finish_sends();
  }
  return result;
}

void Overlap::finish_sends() {
  for (Work& send : sends_) {
    send.wait();
  }
  sends_.clear();
  try {
    comm::all_or_none({group_}, kStepInBackward, [&] {
      if (error_) {
        std::rethrow_exception(std::exchange(error_, nullptr));
      }
    });
  } catch (...) {
    throw ddp::ThrownOnAllRanks{std::current_exception()};
  }
}

CommHook hook_with_zero_step(
    CommHook hook,
    detail::DDPHandle& ddp,
    ZeroRedundancyOptimizer& zero,
    bool shard_buckets) {
  return Overlap::make_hook(
      zero, {std::move(hook), &ddp, shard_buckets, /*is_interleaved=*/false});
}

CommHook hook_with_zero_step_interleaved(
    CommHook hook,
    detail::DDPHandle& ddp,
    ZeroRedundancyOptimizer& zero,
    bool shard_buckets) {
  return Overlap::make_hook(
      zero, {std::move(hook), &ddp, shard_buckets, /*is_interleaved=*/true});
}

} // namespace tessera
