#include "engine/unit_summon.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <memory>
#include <sstream>

#include "engine/keep_alive.h"
#include "engine/owners.h"
#include "engine/start.h"
#include "engine/unit.h"
#include "libtorch/alias.h"

namespace tessera::engine {

UnitSummon::UnitSummon(Unit& unit, const SummonOptions& options)
    : unit_(unit),
      options_(options),
      before_(unit.state()),
      is_shown_(!options.rank0_only || unit.groups().shard.rank() == 0),
      node_(unit.params().find_node()) {
  for (const Bundle& bundle : unit_.bundles()) {
    at::Tensor full = unit_.has_whole_copy() ? bundle.shard()
        : unit_.state() == UnitState::Full
        ? bundle.full().clone()
        : bundle.gather_copy(bundle.shard(), unit_.label());
    if (options_.offload_to_cpu) {
      full = full.to(at::kCPU);
    }
    full_.push_back(is_shown_ ? full : at::Tensor());
  }
  const auto& params = unit_.params().all();
  gradients_.resize(params.size());
  if (options_.with_grads && unit_.has_whole_copy()) {
    for (size_t position = 0; position < params.size(); ++position) {
      gradients_[position] = params[position].leaf.grad();
    }
  } else if (options_.with_grads) {
    gradients_ = gather_gradients();
  }
}

bool UnitSummon::undoes_writes() const {
  return options_.writeback && !shows_shard() && !is_ending_;
}

/// Full gradients by position, defined where any rank has one.
std::vector<at::Tensor> UnitSummon::gather_gradients() const {
  const auto& params = unit_.params().all();
  std::vector<at::Tensor> result(params.size());
  at::Tensor defined =
      at::zeros({static_cast<int64_t>(params.size())}, at::kByte);
  for (size_t position = 0; position < params.size(); ++position) {
    if (params[position].leaf.grad().defined()) {
      defined[static_cast<int64_t>(position)] = 1;
    }
  }
  unit_.groups().shard.all_reduce(defined, ReduceOp::Max, unit_.label());
  for (size_t number = 0; number < unit_.bundles().size(); ++number) {
    const Bundle& bundle = unit_.bundles()[number];
    const Layout& layout = bundle.layout();
    at::Tensor part; // zeros stand in for what only others have
    for (size_t position = 0; position < params.size(); ++position) {
      const UnitParam& param = params[position];
      if (param.bundle != number ||
          defined[static_cast<int64_t>(position)].item<uint8_t>() == 0) {
        continue;
      }
      if (!part.defined()) {
        part = at::zeros_like(bundle.shard());
      }
      const at::Tensor& gradient = param.leaf.grad();
      const Run run = layout.run(param.index, unit_.groups().shard.rank());
      if (gradient.defined() && run.numel > 0) {
        part.narrow(0, run.shard_begin, run.numel)
            .copy_(gradient.reshape({-1}));
      }
    }
    if (!part.defined()) {
      continue;
    }
    const at::Tensor full = bundle.gather_copy(part, unit_.label());
    for (size_t position = 0; position < params.size(); ++position) {
      const UnitParam& param = params[position];
      if (param.bundle == number &&
          defined[static_cast<int64_t>(position)].item<uint8_t>() != 0) {
        result[position] = libtorch::alias_of(
            full, layout.shape(param.index), layout.full_offset(param.index));
      }
    }
  }
  return result;
}

void UnitSummon::show() {
  const auto& params = unit_.params().all();
  if (is_shown_ && compares_copies() && shows_shard()) {
    for (const UnitParam& param : params) { // before anything changes
      digests_.push_back(digest_of(my_values(param)));
    }
  }
  for (size_t position = 0; is_shown_ && position < params.size(); ++position) {
    const UnitParam& param = params[position];
    show(param, gradients_[position]);
    const at::Tensor face = param.lock();
    versions_.push_back(
        face.defined() ? static_cast<uint32_t>(face._version()) : 0);
  }
  gradients_.clear();
}

bool UnitSummon::compares_copies() const {
  return unit_.groups().replicate.valid() && unit_.options().compare_start;
}

bool UnitSummon::shows_shard() const {
  return unit_.has_whole_copy() && !full_.empty() &&
      storage_of(full_.front()) == storage_of(unit_.bundles().front().shard());
}

/// What this rank keeps of a parameter, as its face shows it.
at::Tensor UnitSummon::my_values(const UnitParam& param) const {
  const Bundle& bundle = unit_.bundles()[param.bundle];
  const Run run = bundle.layout().run(param.index, unit_.groups().shard.rank());
  const at::Tensor face = param.lock();
  const bool is_face_shown = is_shown_ && !versions_.empty();
  return is_face_shown && face.defined()
      ? face.detach().reshape({-1}).narrow(0, run.param_begin, run.numel)
      : bundle.shard().narrow(0, run.shard_begin, run.numel);
}

void UnitSummon::show(const UnitParam& param, const at::Tensor& gradient)
    const {
  const at::Tensor face = param.lock();
  if (!face.defined()) {
    return;
  }
  const Layout& layout = unit_.bundles()[param.bundle].layout();
  libtorch::show(
      face,
      libtorch::alias_of(
          full_[param.bundle],
          layout.shape(param.index),
          layout.full_offset(param.index)));
  auto& meta = meta_of(face);
  meta.grad_fn_ = libtorch::NodePtr();
  meta.output_nr_ = 0;
  meta.requires_grad_ = param.trainable;
  meta.grad_ = gradient;
  if (unit_of(face) == nullptr) {
    torch::autograd::impl::add_hook(
        face, std::make_unique<KeepAlive>(unit_.shared_from_this()));
  }
}

/// If the user's changes to the shown parameters cannot be kept, says why.
std::optional<std::string> UnitSummon::objection_to_faces() const {
  for (const UnitParam& param : unit_.params().all()) {
    const at::Tensor face = param.lock();
    const Bundle& bundle = unit_.bundles()[param.bundle];
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
bool UnitSummon::was_written() const {
  const auto& params = unit_.params().all();
  for (size_t position = 0; position < params.size(); ++position) {
    const UnitParam& param = params[position];
    const at::Tensor face = param.lock();
    if (!face.defined()) {
      continue;
    }
    if (static_cast<uint32_t>(face._version()) != versions_[position] ||
        storage_of(face) != storage_of(full_[param.bundle])) {
      return true;
    }
    // Raw pointers leave no trace but the values.
    if (!shows_shard()) {
      const Bundle& bundle = unit_.bundles()[param.bundle];
      const Run run =
          bundle.layout().run(param.index, unit_.groups().shard.rank());
      if (!at::equal(
              my_values(param).to(bundle.shard().device()),
              bundle.shard().narrow(0, run.shard_begin, run.numel))) {
        return true;
      }
    } else if (
        !digests_.empty() &&
        digest_of(my_values(param)) != digests_[position]) {
      return true;
    }
  }
  return false;
}

/// Ranks that keep the same part of different copies of the model each write
/// their values back. Returns a parameter whose values would then differ
/// between copies, the same parameter on all ranks; nothing if there is none.
/// Collective.
std::optional<std::string> UnitSummon::differs_between_copies() const {
  if (!compares_copies()) {
    return std::nullopt;
  }
  const auto& params = unit_.params().all();
  const auto count = static_cast<int64_t>(params.size());
  // The largest digest is the smallest, too, where all are the same.
  const at::Tensor digests = at::empty({count, 2}, at::kLong);
  auto ends = digests.accessor<int64_t, 2>();
  for (int64_t i = 0; i < count; ++i) {
    const auto digest = static_cast<int64_t>(
        digest_of(my_values(params[static_cast<size_t>(i)])));
    ends[i][0] = digest;
    ends[i][1] = ~digest;
  }
  unit_.groups().replicate.all_reduce(digests, ReduceOp::Max, unit_.label());
  at::Tensor after = at::zeros({1}, at::kLong); // parameters from the first on
  for (int64_t i = 0; i < count && after.item<int64_t>() == 0; ++i) {
    if (ends[i][0] != ~ends[i][1]) {
      after.fill_(count - i);
    }
  }
  unit_.groups().all.all_reduce(after, ReduceOp::Max, unit_.label());
  const int64_t left = after.item<int64_t>();
  return left == 0 ? std::nullopt
                   : std::optional<std::string>(
                         params[static_cast<size_t>(count - left)].name);
}

void UnitSummon::write_back_values() const {
  for (const UnitParam& param : unit_.params().all()) {
    const at::Tensor face = param.lock();
    const Bundle& bundle = unit_.bundles()[param.bundle];
    const Run run =
        bundle.layout().run(param.index, unit_.groups().shard.rank());
    if (face.defined() && run.numel > 0 &&
        storage_of(face) != storage_of(bundle.shard())) {
      bundle.shard()
          .narrow(0, run.shard_begin, run.numel)
          .copy_(face.detach().reshape({-1}).narrow(
              0, run.param_begin, run.numel));
    }
  }
}

void UnitSummon::write_back_gradients() const {
  for (const UnitParam& param : unit_.params().all()) {
    const at::Tensor face = param.lock();
    const Run run = unit_.bundles()[param.bundle].layout().run(
        param.index, unit_.groups().shard.rank());
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

/// Where faces show the shard itself, writes to them were writes to the shard.
void UnitSummon::note_writes_in_place() const {
  if (shows_shard()) {
    unit_.count_write();
  }
}

std::string UnitSummon::what_became_of_writes() const {
  return shows_shard()
      ? "This rank has the whole model, so what was written in place stays."
      : "Nothing of this unit was written back.";
}

SummonEnd UnitSummon::write_back() {
  SummonEnd end;
  const bool keeps_edits = shows_shard() || options_.writeback;
  try {
    std::optional<std::string> objection;
    if (is_shown_ && keeps_edits) {
      objection = objection_to_faces();
      end.changed = !objection && was_written();
    }
    if (keeps_edits && unit_.groups().all.size() > 1) {
      // One rank's change makes every rank gather again, those of other copies
      // too, and one rank's error is everyone's.
      at::Tensor any = at::zeros({1}, at::kByte);
      any.mutable_data_ptr<uint8_t>()[0] = objection ? 2 : end.changed ? 1 : 0;
      unit_.groups().all.all_reduce(any, ReduceOp::Max, unit_.label());
      const auto worst = any.item<uint8_t>();
      end.changed = worst == 1;
      if (worst == 2 && !objection) {
        objection = "another rank could not keep its changes.";
      }
    }
    is_ending_ = true; // from here on this write is not refused
    if (objection) {
      note_writes_in_place();
      unit_.fail(
          "summon_full_params", "", *objection + ' ' + what_became_of_writes());
    }
    const auto different =
        end.changed ? differs_between_copies() : std::nullopt;
    if (different) {
      note_writes_in_place();
      unit_.fail(
          "summon_full_params",
          *different,
          "the ranks wrote different values into the copies of the model, which would never be equal again. " +
              what_became_of_writes() +
              (shows_shard() ? " Build the model again, or load a checkpoint."
                             : "") +
              " Write the same values on every rank; random numbers differ from rank to rank, so broadcast them. If the copies are meant to differ, set compare_start(false) when sharding.");
    }
    if (end.changed) {
      unit_.count_write();
      write_back_values();
    }
    if (options_.with_grads && keeps_edits && is_shown_) {
      write_back_gradients();
    }
  } catch (...) {
    end.failure = std::current_exception();
  }
  return end;
}

void UnitSummon::hide() {
  for (UnitParam& param : unit_.params().all()) {
    const at::Tensor face = param.lock();
    if (!is_shown_ || !face.defined()) {
      continue;
    }
    libtorch::show(face, unit_.params().face_alias(param));
    auto& meta = meta_of(face);
    meta.grad_.reset();
    meta.grad_fn_ = libtorch::NodePtr();
    // The flag may have been changed inside: that freezes or thaws.
    unit_.params().set_trainable(param, meta.requires_grad_);
  }
}

} // namespace tessera::engine
