#include <tessera/error.h>
#include <tessera/optim/optimizer.h>
#include <tessera/optim/state_dict.h>

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <utility>

#include "optim/dictionary.h"
#include "optim/libtorch_access.h"
#include "optim/own_access.h"

namespace tessera::optim {

std::unique_ptr<Access> access_to(
    const torch::optim::Optimizer& optimizer,
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    std::string_view call) {
  if (const auto* own = dynamic_cast<const Optimizer*>(&optimizer)) {
    return std::make_unique<OwnAccess>(*own);
  }
  return libtorch_access_to(optimizer, groups, call);
}

bool StatefulOptimizer::has_state() const {
  return !state_dict().at("state").dict().empty();
}

StateDict StatefulOptimizer::collect_state_dict(Collect /*to*/) {
  return state_dict();
}

bool StatefulOptimizer::keeps_state_of(const at::Tensor& /*param*/) const {
  return true;
}

std::function<void()> StatefulOptimizer::snapshot() {
  // Loading makes new tensors, so these keep the old values.
  return [this, dict = state_dict()] { load_state_dict(dict); };
}

StateDict state_dict(const torch::optim::Optimizer& optimizer) {
  if (const auto* own = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    return own->state_dict();
  }
  return write_dictionary(
      optimizer,
      *libtorch_access_to(optimizer, optimizer.param_groups(), "state_dict"));
}

void load_state_dict(
    torch::optim::Optimizer& optimizer,
    const StateDict& dict) {
  if (auto* own = dynamic_cast<StatefulOptimizer*>(&optimizer)) {
    own->load_state_dict(dict);
    return;
  }
  read_dictionary(
      optimizer,
      *libtorch_access_to(
          optimizer, optimizer.param_groups(), "load_state_dict"),
      dict);
}

void initialize_state(torch::optim::Optimizer& optimizer) {
  if (auto* own = dynamic_cast<StatefulOptimizer*>(&optimizer)) {
    own->initialize_state();
    return;
  }
  const auto access = libtorch_access_to(
      optimizer, optimizer.param_groups(), "initialize_state");
  at::NoGradGuard no_grad;
  std::vector<
      std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>>
      made;
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& param : group.params()) {
      const bool gets_state = param.requires_grad() && param.numel() != 0 &&
          optimizer.state().find(param.unsafeGetTensorImpl()) ==
              optimizer.state().end();
      if (gets_state) {
        if (auto state = access->initial_state(param, group.options())) {
          refuse_gradient(param, number, access->name());
          made.emplace_back(param.unsafeGetTensorImpl(), std::move(state));
        }
      }
      ++number;
    }
  }
  for (auto& [key, state] : made) {
    optimizer.state()[key] = std::move(state);
  }
}

bool has_state(const torch::optim::Optimizer& optimizer) {
  const auto* own = dynamic_cast<const StatefulOptimizer*>(&optimizer);
  return own != nullptr ? own->has_state() : !optimizer.state().empty();
}

StateDict collect_state_dict(torch::optim::Optimizer& optimizer, Collect to) {
  auto* own = dynamic_cast<StatefulOptimizer*>(&optimizer);
  return own != nullptr ? own->collect_state_dict(to) : state_dict(optimizer);
}

at::Tensor state_tensor_of(
    const torch::optim::Optimizer& optimizer,
    const at::Tensor& param,
    const StateKey& name) {
  const auto& all = optimizer.state();
  const auto found = all.find(param.unsafeGetTensorImpl());
  const auto* own = found == all.end()
      ? nullptr
      : dynamic_cast<const ParamState*>(found->second.get());
  const StateValue* value = own == nullptr ? nullptr : own->values.find(name);
  return value != nullptr && value->is_tensor() ? value->tensor()
                                                : at::Tensor();
}

bool keeps_state_of(
    const torch::optim::Optimizer& optimizer,
    const at::Tensor& param) {
  const auto* own = dynamic_cast<const StatefulOptimizer*>(&optimizer);
  return own == nullptr || own->keeps_state_of(param);
}

std::function<void()> snapshot(torch::optim::Optimizer& optimizer) {
  if (auto* own = dynamic_cast<StatefulOptimizer*>(&optimizer)) {
    return own->snapshot();
  }
  return [&optimizer, dict = state_dict(optimizer)] {
    load_state_dict(optimizer, dict);
  };
}

void refuse_gradient(
    const at::Tensor& param,
    int64_t number,
    std::string_view name) {
  if (param.grad().defined()) {
    raise(
        {.call = "initialize_state"},
        fmt::format(
            "parameter {1} has a gradient, but this {0} has no state of it yet. Call this function before backward, or make the step first.",
            name,
            number));
  }
}

} // namespace tessera::optim
