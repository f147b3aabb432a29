#include <tessera/comm/init.h>
#include <tessera/error.h>
#include <tessera/train/training_state.h>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

namespace tessera {

namespace {

std::string rank_key() {
  return "rank" + std::to_string(is_initialized() ? world().rank() : 0);
}

/// The device whose random numbers a model draws: a rank need not make its GPU
/// the current one.
at::Device cuda_device_of(const torch::nn::Module& model) {
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.is_cuda()) {
      return parameter.device();
    }
  }
  return {at::kCUDA, at::detail::getCUDAHooks().getCurrentDevice()};
}

/// A generator of this process; undefined if it does not exist.
at::Generator generator(const torch::nn::Module& model, at::DeviceType device) {
  if (device == at::kCPU) {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
  const auto& hooks = at::detail::getCUDAHooks();
  return hooks.hasCUDA() && hooks.getNumGPUs() > 0
      ? at::globalContext().defaultGenerator(cuda_device_of(model))
      : at::Generator();
}

constexpr std::pair<const char*, at::DeviceType> kGenerators[] = {
    {"cpu", at::kCPU},
    {"cuda", at::kCUDA}};

constexpr const char* kOwnParts[] = {"model", "optim", "rng", "values"};

StateDict generator_states(const torch::nn::Module& model) {
  StateDict states;
  for (const auto& [name, device] : kGenerators) {
    at::Generator source = generator(model, device);
    if (source.defined()) {
      const std::lock_guard lock(source.mutex());
      states.set(name, source.get_state());
    }
  }
  return states;
}

void set_generator_states(
    const torch::nn::Module& model,
    const StateDict& states) {
  for (const auto& [name, device] : kGenerators) {
    at::Generator target = generator(model, device);
    const StateValue* state = states.find(name);
    if (target.defined() && state != nullptr) {
      const std::lock_guard lock(target.mutex());
      target.set_state(state->tensor());
    }
  }
}

/// What schedules keep in param groups: a run may begin or end to have one.
bool is_of_schedule(const std::string& name) {
  static constexpr const char* kKept[] = {
      "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"};
  const std::string key = name.substr(name.rfind('.') + 1);
  return name.starts_with("optim.param_groups.") &&
      std::ranges::find(kKept, key) != std::end(kKept);
}

} // namespace

TrainingState::TrainingState(ModuleRef model, OptimizerRefs optimizers)
    : model_(model), optimizers_(std::move(optimizers)) {}

void TrainingState::add(std::string name, checkpoint::Stateful& part) {
  const auto refuse = [&](const std::string& what) {
    raise<c10::ValueError>(
        {.call = "TrainingState::add"},
        "a part with the name \"" + name + "\": " + what);
  };
  if (name.empty() || name.find('.') != std::string::npos) {
    refuse("a name is not empty and has no dot. Choose another name.");
  }
  for (const char* own : kOwnParts) {
    if (name == own) {
      refuse("TrainingState has that part itself. Choose another name.");
    }
  }
  for (const auto& [taken, added] : parts_) {
    if (name == taken) {
      refuse("it was added before. Choose another name.");
    }
  }
  parts_.emplace_back(std::move(name), &part);
}

StateDict TrainingState::state_dict() {
  auto state = tessera::get_state_dict(model_, optimizers_);
  StateDict all{
      {"model", std::move(state.model)},
      {"optim", std::move(state.optimizer)},
      {"rng", StateDict{{rank_key(), generator_states(model_)}}},
      {"values", values}};
  for (const auto& [name, part] : parts_) {
    all.set(name, part->state_dict());
  }
  return all;
}

void TrainingState::load_state_dict(const StateDict& state) {
  // The tensors of the model and of the optimizers were loaded in place; the
  // optimizers' options and counts were not.
  if (!optimizers_.empty()) {
    set_optimizer_state_dict(model_, optimizers_, state.at("optim").dict());
  }
  for (const auto& [name, part] : parts_) {
    part->load_state_dict(state.at(name).dict());
  }
  values = state.at("values").dict();
  set_generator_states(model_, state.at("rng").dict().at(rank_key()).dict());
}

void TrainingState::check_state_dict(const StateDict& state) const {
  for (const auto& [name, part] : parts_) {
    part->check_state_dict(state.at(name).dict());
  }
}

bool TrainingState::is_optional(const std::string& name) const {
  const size_t dot = name.find('.');
  if (dot == std::string::npos) {
    return false;
  }
  const std::string owner = name.substr(0, dot);
  for (const auto& [part_name, part] : parts_) {
    if (owner == part_name) {
      return part->is_optional(name.substr(dot + 1));
    }
  }
  return owner == "rng" || is_of_schedule(name);
}

} // namespace tessera
