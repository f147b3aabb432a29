#include <tessera/error.h>
#include <tessera/optim/optimizer.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_set>
#include <utility>

#include "comm/raw_access.h"
#include "engine/unit.h"
#include "optim/option_fields.h"
#include "optim/own_access.h"
#include "optim/tell_engine.h"

namespace tessera::optim {
namespace {

/// A sharded parameter is not a leaf, and its gradient is that of its shard.
void refuse_face(
    const at::Tensor& param,
    size_t index,
    size_t group,
    const std::string& name) {
  const engine::Unit* unit = engine::unit_of(param);
  if (unit == nullptr || unit->shows_summoned()) {
    return;
  }
  raise<c10::ValueError>(
      {.call = name, .unit = unit->name()},
      fmt::format(
          "parameter {} of param group {} is sharded, but an optimizer steps the shards. Make it after sharding, from the shards: optim::{} optimizer(tessera::parameters(model), ...).",
          index,
          group,
          name));
}

} // namespace

Optimizer::Optimizer(
    std::string name,
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
    std::unique_ptr<Options> defaults)
    : torch::optim::Optimizer(
          std::vector<torch::optim::OptimizerParamGroup>(),
          std::move(defaults)),
      name_(std::move(name)) {
  auto& own = static_cast<Options&>(*defaults_);
  own.complete_from(own);
  check_options(own, {.call = name_});
  for (const auto& group : param_groups) {
    add_param_group(group);
  }
}

void Optimizer::add_param_group(
    const torch::optim::OptimizerParamGroup& group) {
  if (group.has_options()) {
    check_class(group.options(), *this, {.call = name_});
  }
  std::unordered_set<const c10::TensorImpl*> held;
  for (const auto& other : param_groups_) {
    for (const at::Tensor& param : other.params()) {
      held.insert(param.unsafeGetTensorImpl());
    }
  }
  for (size_t i = 0; i < group.params().size(); ++i) {
    refuse_face(group.params()[i], i, param_groups_.size(), name_);
    if (!held.insert(group.params()[i].unsafeGetTensorImpl()).second) {
      raise<c10::ValueError>(
          {.call = name_},
          fmt::format(
              "parameter {} of group {} is in this optimizer already: it would be updated twice.",
              i,
              param_groups_.size()));
    }
  }
  torch::optim::Optimizer::add_param_group(group);
  if (group.has_options()) {
    // LibTorch keeps only options of its own classes.
    param_groups_.back().set_options(group.options().clone());
  }
  *num_groups_ = param_groups_.size();
  options_of(param_groups_.size() - 1);
  watch_plain_params(param_groups_, name_, num_groups_);
}

void Optimizer::save(torch::serialize::OutputArchive&) const {
  refuse_archive();
}

void Optimizer::load(torch::serialize::InputArchive&) {
  refuse_archive();
}

void Optimizer::refuse_archive() const {
  raise<c10::NotImplementedError>(
      {.call = name_},
      "torch::save and torch::load know the state of LibTorch's own optimizers only. Use tessera::optim::state_dict and load_state_dict.");
}

/// LibTorch's add_param_group() is not virtual.
void Optimizer::check_groups() {
  if (param_groups_.size() > *num_groups_) {
    raise<c10::ValueError>(
        {.call = name_},
        fmt::format(
            "param group {} was added through a torch::optim::Optimizer&, which drops its options. Call add_param_group() of the {} itself.",
            *num_groups_,
            name_));
  }
  *num_groups_ = param_groups_.size(); // groups may have been removed
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& params = param_groups_[group].params();
    for (size_t i = 0; i < params.size(); ++i) {
      refuse_face(params[i], i, group, name_);
    }
  }
}

const Options& Optimizer::options_of(size_t group) {
  auto& given = param_groups_[group].options();
  check_class(given, *this, {.call = name_});
  auto& options = static_cast<Options&>(given);
  if (!options.is_complete()) {
    options.complete_from(static_cast<Options&>(*defaults_));
    check_options(options, {.call = name_});
  }
  return options;
}

std::optional<std::string> Optimizer::capture_objection() const {
  return fmt::format(
      "{} uses numbers of the host in each step, which a replay would repeat. AdamW, Adam and SGD of tessera::optim can be captured.",
      name_);
}

std::optional<std::string> capture_objection(
    const torch::optim::Optimizer& optimizer) {
  if (const auto* own = dynamic_cast<const Capturable*>(&optimizer)) {
    return own->capture_objection();
  }
  return "an optimizer that is not Tessera's counts its steps on the host, and a replay would repeat one count. Use AdamW, Adam or SGD of tessera::optim.";
}

StateDict& Optimizer::state_of(const at::Tensor& param) {
  auto& state = state_[param.unsafeGetTensorImpl()];
  if (!state) {
    state = std::make_unique<ParamState>();
  }
  return static_cast<ParamState&>(*state).values;
}

const StateDict* Optimizer::find_state(const at::Tensor& param) const {
  const auto found = state_.find(param.unsafeGetTensorImpl());
  if (found == state_.end()) {
    return nullptr;
  }
  const StateDict& values =
      static_cast<const ParamState&>(*found->second).values;
  return values.empty() ? nullptr : &values;
}

void Optimizer::initialize(const Options& options, Batch& batch) {
  update(options, batch);
}

bool Optimizer::is_stepped_together(const at::Tensor& /*param*/) const {
  return false;
}

void Optimizer::check_step(const std::function<void()>& checks) {
  checks();
}

void Optimizer::step_together() {}

/// Throws if the gradient, which the parameter has, cannot be used.
void Optimizer::check_gradient(size_t group, size_t index) const {
  const at::Tensor& param = param_groups_[group].params()[index];
  const at::Tensor& gradient = param.grad();
  if (gradient.layout() != at::kStrided) {
    raise(
        {.call = name_},
        fmt::format(
            "parameter {} of param group {} has a sparse gradient. Make it dense (sparse(false) in EmbeddingOptions), or update it with torch::optim::SGD.",
            index,
            group));
  }
  if (gradient.sizes() != param.sizes() ||
      gradient.device() != param.device()) {
    raise(
        {.call = name_},
        fmt::format(
            "parameter {} of param group {} has shape [{}] on {}, but its gradient has shape [{}] on {}. Assign gradients that are like their parameters.",
            index,
            group,
            fmt::join(param.sizes(), ", "),
            param.device().str(),
            fmt::join(gradient.sizes(), ", "),
            gradient.device().str()));
  }
  if (gradient.scalar_type() != param.scalar_type()) {
    raise(
        {.call = name_},
        fmt::format(
            "parameter {} of param group {} has dtype {}, but its gradient has dtype {}. Convert the gradient.",
            index,
            group,
            c10::toString(param.scalar_type()),
            c10::toString(gradient.scalar_type())));
  }
}

std::vector<Batch> Optimizer::batches_of(size_t group) {
  std::vector<Batch> batches;
  const auto& params = param_groups_[group].params();
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = params[i];
    const at::Tensor& gradient = param.grad();
    if (!gradient.defined()) {
      continue;
    }
    if (is_stepped_together(param)) {
      check_gradient(group, i);
      continue;
    }
    if (param.numel() == 0) {
      // Other ranks' kernels are seen to write to their shards. This rank has
      // nothing to write, so it reports the write here.
      comm::before_raw_write(param, name_.c_str());
      continue;
    }
    check_gradient(group, i);
    at::Tensor dense =
        param.is_non_overlapping_and_dense() ? param : param.contiguous();
    batch_for(batches, param)
        .add({param, std::move(dense), &state_of(param)}, gradient);
  }
  return batches;
}

Batch& Optimizer::batch_for(
    std::vector<Batch>& batches,
    const at::Tensor& param) {
  const auto real_type = c10::toRealValueType(param.scalar_type());
  for (Batch& batch : batches) {
    const at::Tensor& first = batch.params.front();
    if (first.scalar_type() == real_type && first.device() == param.device()) {
      return batch;
    }
  }
  return batches.emplace_back();
}

at::Tensor Optimizer::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    at::AutoGradMode with_grad(true);
    loss = closure();
  }
  // Everything is prepared first: if this throws, every parameter is as it was.
  std::vector<std::pair<const Options*, std::vector<Batch>>> work;
  check_step([&] {
    check_groups();
    for (size_t i = 0; i < param_groups_.size(); ++i) {
      const Options& options = options_of(i);
      work.emplace_back(&options, batches_of(i));
    }
  });
  tell_of_step(param_groups_);
  step_together();
  for (auto& [options, batches] : work) {
    for (Batch& batch : batches) {
      update(*options, batch);
      batch.write_back();
    }
  }
  return loss;
}

StateDict Optimizer::state_dict() const {
  return write_dictionary(*this, OwnAccess(*this));
}

void Optimizer::load_state_dict(const StateDict& dict) {
  read_dictionary(*this, OwnAccess(*this), dict);
}

void Optimizer::initialize_state() {
  at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, StateDict>> made;
  int64_t number = 0;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    const Options& options = options_of(i);
    for (const at::Tensor& param : param_groups_[i].params()) {
      const bool gets_state = param.requires_grad() && param.numel() != 0 &&
          find_state(param) == nullptr;
      if (gets_state) {
        // The step updates a stand-in instead of the parameter: even with lr 0
        // it could turn a -0 into a 0, and writing to a shard makes its unit
        // gather again.
        const at::Tensor stand_in = at::zeros_like(param);
        StateDict values;
        Batch batch;
        batch.add({stand_in, stand_in, &values}, at::zeros_like(param));
        initialize(options, batch);
        if (!values.empty()) {
          refuse_gradient(param, number, name_);
          made.emplace_back(param, std::move(values));
        }
      }
      ++number;
    }
  }
  for (auto& [param, values] : made) {
    state_of(param) = std::move(values);
  }
}

} // namespace tessera::optim
