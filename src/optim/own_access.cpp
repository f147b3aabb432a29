#include "optim/own_access.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/util/Type.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <typeinfo>
#include <utility>

#include "optim/option_fields.h"
#include "optim/state_values.h"

namespace tessera::optim {
namespace {

bool is_one_of(const StateKey& name, std::span<const char* const> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* known) {
    return name == StateKey(known);
  });
}

} // namespace

std::string OwnAccess::name() const {
  return optimizer_.name();
}

void OwnAccess::write_options(
    const torch::optim::OptimizerOptions& options,
    StateDict& group) const {
  const auto copy = complete_copy(options, {.call = optimizer_.name()});
  auto& own = static_cast<Options&>(*copy);
  write_fields(own.fields(), group);
  for (const auto& [key, value] : own.extra()) {
    group.set(key, value);
  }
}

std::unique_ptr<torch::optim::OptimizerOptions> OwnAccess::read_options(
    const torch::optim::OptimizerOptions& current,
    const StateDict& group,
    const ErrorSite& site,
    const std::string& where) const {
  auto copy = complete_copy(current, site);
  auto& options = static_cast<Options&>(*copy);
  const auto fields = options.fields();
  read_fields(fields, group, site, where);
  for (const auto& [key, value] : group) {
    const bool is_field = std::any_of(
        fields.begin(), fields.end(), [&own = key](const auto& field) {
          return own == StateKey(field.key);
        });
    if (!is_field && !(key == StateKey("params"))) {
      refuse_others_option(key, site);
      options.extra().set(key, value.clone());
    }
  }
  check_options(options, site);
  return copy;
}

StateDict OwnAccess::write_state(
    const torch::optim::OptimizerParamState& state) const {
  return static_cast<const ParamState&>(state).values;
}

void OwnAccess::check_state(
    const at::Tensor& param,
    const torch::optim::OptimizerOptions& /*options*/,
    const StateDict& values,
    const ErrorSite& site) const {
  bool has_own = false;
  for (const auto& [name, value] : values) {
    const StateField* known = field(name);
    if (known == nullptr && !value.is_none()) {
      refuse_others_state(name, site);
    }
    if (known == nullptr || (value.is_none() && !known->is_required)) {
      continue;
    }
    has_own = true;
    if (known->kind == StateField::Kind::LikeParam) {
      check_like_param(param, known->name, value, site);
    } else {
      scalar_of(known->name, value, site);
    }
  }
  for (const StateField& known : fields_) {
    if (has_own && known.is_required && !values.contains(known.name)) {
      raise<c10::ValueError>(
          site,
          fmt::format(
              "there is state, but no \"{}\". Was it saved by another kind of optimizer?",
              known.name));
    }
  }
}

std::unique_ptr<torch::optim::OptimizerParamState> OwnAccess::read_state(
    const at::Tensor& param,
    const StateDict& values) const {
  auto state = std::make_unique<ParamState>();
  for (const auto& [name, value] : values) {
    const StateField* known = field(name);
    if (known == nullptr || value.is_none()) {
      // As in Python, "step" keeps its dtype and device.
      state->values.set(
          name,
          name == StateKey("step") ? value.clone() : copy_for(param, value));
      continue;
    }
    if (known->kind == StateField::Kind::LikeParam) {
      const at::Tensor own = state_tensor_of(optimizer_, param, name);
      if (is_same_memory(own, value.tensor())) {
        state->values.set(name, own); // its values were read into it
        continue;
      }
      at::Tensor copy = at::empty_like(param);
      copy.copy_(value.tensor());
      state->values.set(name, std::move(copy));
      continue;
    }
    const bool on_host = known->kind == StateField::Kind::HostScalar;
    state->values.set(
        name,
        at::full(
            {},
            scalar_of(known->name, value, {}),
            at::TensorOptions(at::kFloat)
                .device(on_host ? at::Device(at::kCPU) : param.device())));
  }
  return state;
}

std::unique_ptr<torch::optim::OptimizerOptions> OwnAccess::complete_copy(
    const torch::optim::OptimizerOptions& options,
    const ErrorSite& site) const {
  check_class(options, optimizer_, site);
  auto copy = options.clone();
  const auto defaults = optimizer_.defaults().clone();
  static_cast<Options&>(*copy).complete_from(static_cast<Options&>(*defaults));
  return copy;
}

/// Any other option is kept, as in Python. SGD and Muon have state of the same
/// name, so their options tell them apart.
void OwnAccess::refuse_others_option(
    const StateKey& name,
    const ErrorSite& site) const {
  static constexpr std::array kNames{
      "adjust_lr_fn", "dampening", "ns_coefficients", "ns_steps"};
  if (is_one_of(name, kNames)) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "a param group has \"{}\", which is not an option of {}: it was saved by another kind of optimizer. Load it into that one.",
            name.text(),
            optimizer_.name()));
  }
}

/// Any other name is kept, as in Python. These names are known to belong to
/// another class, whose state this class would not use.
void OwnAccess::refuse_others_state(const StateKey& name, const ErrorSite& site)
    const {
  static constexpr std::array kNames{
      "acc_delta",
      "exp_avg",
      "exp_avg_sq",
      "exp_inf",
      "grad_avg",
      "max_exp_avg_sq",
      "momentum_buffer",
      "square_avg",
      "sum"};
  if (is_one_of(name, kNames)) {
    raise<c10::ValueError>(
        site,
        fmt::format(
            "there is state \"{}\", which {} does not keep: it was saved by another kind of optimizer. Load it into that one, or leave the state out and start with the parameters alone.",
            name.text(),
            optimizer_.name()));
  }
}

const StateField* OwnAccess::field(const StateKey& name) const {
  for (const StateField& field : fields_) {
    if (name == StateKey(field.name)) {
      return &field;
    }
  }
  return nullptr;
}

void check_class(
    const torch::optim::OptimizerOptions& options,
    const Optimizer& optimizer,
    const ErrorSite& site) {
  const auto& defaults = optimizer.defaults();
  if (typeid(options) != typeid(defaults)) {
    raise<c10::TypeError>(
        site,
        fmt::format(
            "a param group has options of class {}. Give it {}.",
            c10::demangle(typeid(options).name()),
            c10::demangle(typeid(defaults).name())));
  }
}

void check_options(Options& options, const ErrorSite& site) {
  auto objection = range_objection(options.fields());
  if (!objection) {
    objection = options.objection();
  }
  std::vector<std::string> own{"params"};
  for (const OptionField& field : options.fields()) {
    own.emplace_back(field.key);
  }
  for (const std::string& key : own) {
    if (!objection && options.extra().contains(key)) {
      objection = fmt::format(
          "extra() has the key \"{}\", which is this class's own. Set the option.",
          key);
    }
  }
  if (objection) {
    raise<c10::ValueError>(site, *objection);
  }
}

} // namespace tessera::optim
