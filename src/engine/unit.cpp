#include "engine/unit.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "deferred/replay.h"
#include "engine/first_touch.h"
#include "engine/owners.h"
#include "engine/start.h"
#include "libtorch/alias.h"
#include "libtorch/pickling.h"

namespace tessera::engine {
namespace {

/// Saving reads no operator's operand, so nothing gathers: a parameter may have
/// no memory now, values of before the last step, or the compute dtype.
void refuse_to_pickle_sharded(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return;
  }
  const StorageOwner owner = find_owner(storage_of(tensor));
  if (owner.unit != nullptr && !owner.is_shard && tensor.numel() != 0) {
    raise(
        {.call = "torch::save", .unit = owner.unit->name()},
        "raw access to a sharded parameter. Save inside tessera::summon_full_params(module), or take tessera::state_dict(module).");
  }
}

} // namespace

Unit::Unit(
    std::string name,
    int number,
    const Groups& groups,
    const UnitOptions& options,
    std::shared_ptr<Schedule> schedule)
    : UnitIdentity(std::move(name), number, groups, options),
      schedule_(std::move(schedule)),
      params_(*this),
      gradients_(*this),
      start_(
          options.compare_start && !options.sync_from_rank0 &&
          groups.all.size() > 1) {}

Unit::~Unit() {
  for (Bundle& bundle : bundles_) {
    forget_owner(bundle.storage());
    forget_owner(storage_of(bundle.shard()));
    bundle.settle(); // it writes into memory that goes now
    if (bundle.shows_shard()) {
      bundle.free_full(raw_access_error()); // a view must not outlive the shard
    }
  }
}

void Unit::shard(const std::vector<NamedParam>& params, BufferPool& pool) {
  enable_first_touch();
  libtorch::check_before_pickling(refuse_to_pickle_sharded);
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  make_bundles(params, pool);
  params_.shard(params);
  for (Bundle& bundle : bundles_) {
    bundle.free_full(raw_access_error());
  }
}

/// Sorts the parameters by dtype and cuts this rank's shards out of them.
void Unit::make_bundles(
    const std::vector<NamedParam>& params,
    BufferPool& pool) {
  std::vector<at::ScalarType> dtypes;
  std::vector<std::vector<size_t>> members;
  for (const NamedParam& param : params) {
    const at::Tensor& tensor = param.tensor;
    const auto dtype = tensor.scalar_type();
    auto found = std::find(dtypes.begin(), dtypes.end(), dtype);
    if (found == dtypes.end()) {
      found = dtypes.insert(dtypes.end(), dtype);
      members.emplace_back();
    }
    const auto bundle = static_cast<size_t>(found - dtypes.begin());
    params_.add(param, {bundle, members[bundle].size()});
    members[bundle].push_back(params_.all().size() - 1);
  }
  bundles_.reserve(members.size()); // owners and faces know their storages
  for (const auto& positions : members) {
    std::vector<Shape> shapes;
    for (size_t position : positions) {
      shapes.push_back(params[position].tensor.sizes().vec());
    }
    const at::Tensor& first = params[positions.front()].tensor;
    Layout::Alignment alignment = options().alignment;
    if (options().param_alignment_bytes > 0) {
      alignment.param = options().param_alignment_bytes /
          static_cast<int64_t>(c10::elementSize(
              options().param_dtype.value_or(first.scalar_type())));
    }
    Layout layout(
        options().layout, std::move(shapes), groups().shard.size(), alignment);
    const at::Device device =
        is_deferred(first) ? deferred::intended_device(first) : first.device();
    auto memory = at::TensorOptions(device).dtype(first.scalar_type());
    if (options().offload) {
      memory = memory.device(at::kCPU).pinned_memory(device.is_cuda());
    }
    const at::Tensor shard = at::zeros({layout.shard_numel()}, memory);
    for (size_t index = 0; index < positions.size(); ++index) {
      const Run run = layout.run(index, groups().shard.rank());
      shard.narrow(0, run.shard_begin, run.numel)
          .copy_(part_of(params[positions[index]], run));
    }
    bundles_.emplace_back(
        std::move(layout), shard, device, groups(), options(), pool);
    set_owner(bundles_.back().storage(), {this, false});
    set_owner(storage_of(shard), {this, true});
  }
}

/// This rank's elements of a parameter, in one dimension.
at::Tensor Unit::part_of(const NamedParam& param, const Run& run) {
  const bool is_whole = !is_deferred(param.tensor);
  if (!is_whole && !options().sync_from_rank0) {
    const auto part =
        deferred::replay_part(param.tensor, run.param_begin, run.numel);
    if (part && (part->digest_of_whole || !start_.is_open())) {
      start_.add(param.name, part->digest_of_whole.value_or(0));
      return part->elements;
    }
  }
  at::Tensor whole =
      is_whole ? param.tensor.detach() : deferred::replay(param.tensor);
  if (options().sync_from_rank0) {
    whole = whole.contiguous();
    groups().all.broadcast(whole, 0, param.name);
  }
  if (start_.is_open()) {
    start_.add(param.name, digest_of(whole));
  }
  return whole.reshape({-1}).narrow(0, run.param_begin, run.numel);
}

bool Unit::start_gather() {
  if (state_ != UnitState::Sharded) {
    return false;
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  params_.check_faces("gather");
  params_.follow_requires_grad();
  const bool changed = is_stale();
  try {
    for (Bundle& bundle : bundles_) {
      bundle.start_gather(label(), num_writes());
    }
  } catch (...) { // not gathering: nobody may take this for a gather
    for (Bundle& bundle : bundles_) {
      bundle.settle();
      bundle.free_full(raw_access_error());
    }
    throw;
  }
  state_ = UnitState::Gathering;
  gathered_at_ = num_writes();
  if (changed) {
    params_.bump_versions();
  }
  return true;
}

void Unit::finish_gather() {
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  state_ = UnitState::Full;
  try {
    for (Bundle& bundle : bundles_) {
      bundle.finish_gather();
    }
  } catch (...) {
    for (Bundle& bundle : bundles_) {
      bundle.settle();
    }
    throw;
  }
}

bool Unit::reshard() {
  if (state_ != UnitState::Full) {
    return false;
  }
  state_ = UnitState::Sharded;
  is_pinned_ = false;
  for (Bundle& bundle : bundles_) {
    bundle.free_full(raw_access_error());
  }
  return true;
}

at::Tensor Unit::flat_param() const {
  if (bundles_.size() != 1) {
    fail(
        "flat_param",
        "",
        bundles_.empty() ? "this unit has no parameters."
                         : "this unit has parameters of several dtypes.");
  }
  const Bundle& bundle = bundles_.front();
  if (shows_summoned()) {
    const Layout& layout = bundle.layout();
    return summoned_->full().front().narrow(
        0,
        0,
        options().one_leaf ? layout.unpadded_numel() : layout.full_numel());
  }
  // With the key, so that writes to it are seen.
  return options().one_leaf
      ? params_.all().front().leaf
      : libtorch::alias_of(
            bundle.shard(), bundle.shard().sizes(), 0, kShardKeys);
}

void Unit::count_write(const at::Tensor& written) {
  if (summoned_ && summoned_->undoes_writes()) {
    fail(
        "write",
        "",
        "this writes to a shard inside summon_full_params, which would write its own values back over it. Close the guard first.");
  }
  start_.note_written(bundles_, groups().shard.rank(), written);
  {
    const std::scoped_lock lock(write_mutex_);
    for (Bundle& bundle : bundles_) {
      bundle.before_write();
    }
  }
  add_write();
}

void Unit::forget_casts() {
  for (Bundle& bundle : bundles_) {
    bundle.forget_cast();
  }
}

void Unit::summon(const SummonOptions& options) {
  auto summoned = std::make_unique<UnitSummon>(*this, options);
  summoned->show();
  state_ = UnitState::Summoned;
  summoned_ = std::move(summoned);
}

SummonEnd Unit::end_summon() {
  if (state_ != UnitState::Summoned) {
    return {};
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  const SummonEnd end = summoned_->write_back();
  if (has_whole_copy()) { // what shows the shard may be written without a trace
    forget_casts();
  }
  // Whatever happened, nothing stays summoned.
  const auto summoned = std::move(summoned_);
  state_ = summoned->before();
  summoned->hide();
  return end;
}

} // namespace tessera::engine
