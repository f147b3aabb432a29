// The full parameters of a unit, shown to the user.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <exception>
#include <sstream>

#include "engine/unit_parts.h"
#include "libtorch/alias.h"

namespace tessera::engine {

/// Full gradients by position, defined where any rank has one.
std::vector<at::Tensor> Unit::gather_gradients() {
  std::vector<at::Tensor> result(params_.size());
  at::Tensor defined =
      at::zeros({static_cast<int64_t>(params_.size())}, at::kByte);
  for (size_t position = 0; position < params_.size(); ++position) {
    if (params_[position].leaf.grad().defined()) {
      defined[static_cast<int64_t>(position)] = 1;
    }
  }
  groups_.shard.all_reduce(defined, ReduceOp::Max, label_);
  for (size_t number = 0; number < bundles_.size(); ++number) {
    const Bundle& bundle = bundles_[number];
    const Layout& layout = bundle.layout();
    at::Tensor part; // zeros stand in for what only others have
    for (size_t position = 0; position < params_.size(); ++position) {
      const Param& param = params_[position];
      if (param.bundle != number ||
          defined[static_cast<int64_t>(position)].item<uint8_t>() == 0) {
        continue;
      }
      if (!part.defined()) {
        part = at::zeros_like(bundle.shard());
      }
      const at::Tensor& gradient = param.leaf.grad();
      const Run run = layout.run(param.index, groups_.shard.rank());
      if (gradient.defined() && run.numel > 0) {
        part.narrow(0, run.shard_begin, run.numel)
            .copy_(gradient.reshape({-1}));
      }
    }
    if (!part.defined()) {
      continue;
    }
    const at::Tensor full = bundle.gather_copy(part, label_);
    for (size_t position = 0; position < params_.size(); ++position) {
      const Param& param = params_[position];
      if (param.bundle == number &&
          defined[static_cast<int64_t>(position)].item<uint8_t>() != 0) {
        result[position] = alias_of(
            full, layout.shape(param.index), layout.full_offset(param.index));
      }
    }
  }
  return result;
}

void Unit::show_summoned(
    Param& param,
    const at::Tensor& full,
    const at::Tensor& grad) {
  const at::Tensor face = param.lock();
  if (!face.defined()) {
    return;
  }
  const Layout& layout = bundles_[param.bundle].layout();
  show(
      face,
      alias_of(
          full, layout.shape(param.index), layout.full_offset(param.index)));
  auto& meta = meta_of(face);
  meta.grad_fn_ = NodePtr();
  meta.output_nr_ = 0;
  meta.requires_grad_ = param.trainable;
  meta.grad_ = grad;
  if (unit_of(face) == nullptr) {
    torch::autograd::impl::add_hook(
        face, std::make_unique<KeepAlive>(shared_from_this()));
  }
}

void Unit::summon(const SummonOptions& options) {
  auto summoning = std::make_unique<Summoning>();
  summoning->options = options;
  summoning->shown = !options.rank0_only || groups_.shard.rank() == 0;
  summoning->before = state_;
  summoning->node = node_.lock();
  const bool exposes = exposes_shard();
  for (const Bundle& bundle : bundles_) {
    at::Tensor full = exposes ? bundle.shard()
        : state_ == UnitState::Full
        ? bundle.full().clone()
        : bundle.gather_copy(bundle.shard(), label_);
    if (options.offload_to_cpu) {
      full = full.to(at::kCPU);
    }
    summoning->full.push_back(summoning->shown ? full : at::Tensor());
  }
  std::vector<at::Tensor> gradients(params_.size());
  if (options.with_grads && exposes) {
    for (size_t position = 0; position < params_.size(); ++position) {
      gradients[position] = params_[position].leaf.grad();
    }
  } else if (options.with_grads) {
    gradients = gather_gradients();
  }
  if (summoning->shown) {
    for (size_t position = 0; position < params_.size(); ++position) {
      Param& param = params_[position];
      show_summoned(param, summoning->full[param.bundle], gradients[position]);
      const at::Tensor face = param.lock();
      summoning->versions.push_back(
          face.defined() ? static_cast<uint32_t>(face._version()) : 0);
    }
  }
  state_ = UnitState::Summoned;
  summoned_ = std::move(summoning);
}

/// Why what a user did to the shown parameters cannot be kept, if so.
std::optional<std::string> Unit::objection_to_faces() const {
  for (const Param& param : params_) {
    const at::Tensor face = param.lock();
    const Bundle& bundle = bundles_[param.bundle];
    const Shape& shape = bundle.layout().shape(param.index);
    if (face.defined() &&
        (face.sizes() != at::IntArrayRef(shape) ||
         face.scalar_type() != bundle.shard().scalar_type())) {
      std::ostringstream text;
      text << "parameter \"" << param.name << "\" is now "
           << c10::toString(face.scalar_type()) << ' ' << face.sizes()
           << "; expected " << c10::toString(bundle.shard().scalar_type())
           << ' ' << at::IntArrayRef(shape)
           << ". A sharded parameter keeps its shape and dtype.";
      return text.str();
    }
  }
  return std::nullopt;
}

/// True if a face was written while Summoned, as far as this rank can tell.
bool Unit::was_written() const {
  for (size_t position = 0; position < params_.size(); ++position) {
    const Param& param = params_[position];
    const at::Tensor face = param.lock();
    if (!face.defined()) {
      continue;
    }
    if (static_cast<uint32_t>(face._version()) !=
            summoned_->versions[position] ||
        storage_of(face) != storage_of(summoned_->full[param.bundle])) {
      return true;
    }
    const Bundle& bundle = bundles_[param.bundle];
    const Run run = bundle.layout().run(param.index, groups_.shard.rank());
    // Raw pointers leave no trace but the values.
    if (!at::equal(
            face.detach()
                .reshape({-1})
                .narrow(0, run.param_begin, run.numel)
                .to(bundle.shard().device()),
            bundle.shard().narrow(0, run.shard_begin, run.numel))) {
      return true;
    }
  }
  return false;
}

void Unit::write_back() {
  for (const Param& param : params_) {
    const at::Tensor face = param.lock();
    const Bundle& bundle = bundles_[param.bundle];
    const Run run = bundle.layout().run(param.index, groups_.shard.rank());
    if (face.defined() && run.numel > 0 &&
        storage_of(face) != storage_of(bundle.shard())) {
      bundle.shard()
          .narrow(0, run.shard_begin, run.numel)
          .copy_(face.detach().reshape({-1}).narrow(
              0, run.param_begin, run.numel));
    }
  }
}

void Unit::write_back_gradients() {
  for (const Param& param : params_) {
    const at::Tensor face = param.lock();
    const Run run =
        bundles_[param.bundle].layout().run(param.index, groups_.shard.rank());
    if (!face.defined() || !face.grad().defined() || run.numel == 0) {
      continue;
    }
    if (face.grad().is_same(param.leaf.grad())) {
      continue;
    }
    const at::Tensor part = face.grad()
                                .reshape({-1})
                                .narrow(0, run.param_begin, run.numel)
                                .view(param.leaf.sizes());
    at::Tensor& gradient = param.leaf.mutable_grad();
    if (gradient.defined()) {
      gradient.copy_(part);
    } else {
      gradient = part.to(param.leaf.options(), false, /*copy=*/true);
    }
  }
}

void Unit::hide_summoned() {
  for (Param& param : params_) {
    const at::Tensor face = param.lock();
    if (!face.defined()) {
      continue;
    }
    show(face, face_alias(param));
    auto& meta = meta_of(face);
    meta.grad_.reset();
    meta.grad_fn_ = NodePtr();
    // The flag may have been changed inside: that freezes or thaws.
    param.trainable = meta.requires_grad_;
    set_trainable(param, param.trainable);
  }
}

SummonEnd Unit::end_summon() {
  if (state_ != UnitState::Summoned) {
    return {};
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  const SummonOptions options = summoned_->options;
  const bool exposes = exposes_shard();
  std::optional<std::string> objection;
  SummonEnd end;
  try {
    if (summoned_->shown && (exposes || options.writeback)) {
      objection = objection_to_faces();
      end.changed = !objection && was_written();
    }
    if ((exposes || options.writeback) && groups_.all.size() > 1) {
      // One rank's change makes every rank gather again, those of other copies
      // too, and one rank's error is everyone's.
      at::Tensor any = at::zeros({1}, at::kByte);
      any.mutable_data_ptr<uint8_t>()[0] = objection ? 2 : end.changed ? 1 : 0;
      groups_.all.all_reduce(any, ReduceOp::Max, label_);
      const auto worst = any.item<uint8_t>();
      end.changed = worst == 1;
      if (worst == 2 && !objection) {
        objection = "another rank could not keep its changes.";
      }
    }
    if (end.changed) {
      state_ = summoned_->before; // no longer refused
      count_write();
      write_back();
    }
    if (objection) {
      fail("summon_full_params", "", *objection + " Nothing was written back.");
    }
    if (options.with_grads && (options.writeback || exposes) &&
        summoned_->shown) {
      write_back_gradients();
    }
  } catch (...) {
    end.failure = std::current_exception();
  }
  // Whatever happened, nothing stays summoned.
  const auto summoned = std::move(summoned_);
  state_ = summoned->before;
  if (summoned->shown) {
    hide_summoned();
  }
  return end;
}

} // namespace tessera::engine
