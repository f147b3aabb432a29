#include <tessera/error.h>
#include <tessera/exported/exported.h>

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <atomic>
#include <utility>

#include "exported/loaded_model.h"
#include "exported/refused_inputs.h"
#include "state/nearest.h"

namespace tessera {

ExportedModule::ExportedModule(std::string path, std::string class_name)
    : torch::nn::Module(path.empty() ? "Exported" : path),
      path_(std::move(path)),
      class_name_(std::move(class_name)) {}

void ExportedModule::train(bool on) {
  torch::nn::Module::train(on);
  if (mode_was_set_ != nullptr) {
    *mode_was_set_ = true;
  }
}

void ExportedModule::to(
    at::Device device,
    at::ScalarType dtype,
    bool non_blocking) {
  convert(device, dtype, non_blocking);
}

void ExportedModule::to(at::ScalarType dtype, bool non_blocking) {
  convert(std::nullopt, dtype, non_blocking);
}

void ExportedModule::to(at::Device device, bool non_blocking) {
  convert(device, std::nullopt, non_blocking);
}

void ExportedModule::convert(
    std::optional<at::Device> device,
    std::optional<at::ScalarType> dtype,
    bool non_blocking) {
  if (dtype && !c10::isFloatingType(*dtype)) {
    raise<c10::ValueError>(
        {.call = "to"},
        fmt::format(
            "an exported model can be converted to a floating dtype, not to {}.",
            c10::getDtypeNames(*dtype).first));
  }
  const auto move = [&](const at::Tensor& tensor) {
    const bool converts = dtype && tensor.is_floating_point();
    tensor.set_data(tensor.to(
        device.value_or(tensor.device()),
        converts ? *dtype : tensor.scalar_type(),
        non_blocking));
  };
  for (const auto& parameter : named_parameters(/*recurse=*/false)) {
    move(parameter.value());
  }
  for (const auto& buffer : named_buffers(/*recurse=*/false)) {
    move(buffer.value());
  }
  for (const auto& child : children()) {
    if (auto* part = dynamic_cast<ExportedModule*>(child.get())) {
      part->convert(device, dtype, non_blocking);
    } else if (device && dtype) { // a module that the program registered
      child->to(*device, *dtype, non_blocking);
    } else if (device) {
      child->to(*device, non_blocking);
    } else if (dtype) {
      child->to(*dtype, non_blocking);
    }
  }
}

ExportedImpl::ExportedImpl(std::unique_ptr<exported::Model> model)
    : ExportedModule("", ""), model_(std::move(model)) {
  model_->build(*this);
  ExportedModule::train(model_->begins_in_training());
  *mode_was_set_ = false;
}

ExportedImpl::~ExportedImpl() = default;

at::Tensor ExportedImpl::forward(const at::Tensor& input) {
  return run({input}).tensor();
}

ExportedValue ExportedImpl::forward(const ExportedArgs& args) {
  return run(args);
}

ExportedValue ExportedImpl::run(const ExportedArgs& args) {
  exported::ForwardNumber number{.among_all = ++num_forwards_};
  if (is_training() && at::GradMode::is_enabled()) {
    number.among_learning = ++num_learning_forwards_;
  }
  exported::Model::Forward forward;
  try {
    check_modes();
    forward = model_->begin(args, is_training());
  } catch (c10::Error& error) {
    exported::refuse_together(*this, number, error);
    throw;
  }
  return model_->run(forward);
}

std::shared_ptr<torch::nn::Module> ExportedImpl::clone(
    const std::optional<at::Device>& device) const {
  auto copy = std::make_shared<ExportedImpl>(model_->copy(device));
  const auto mine = named_parameters();
  for (auto& parameter : copy->named_parameters()) {
    parameter.value().set_requires_grad(mine[parameter.key()].requires_grad());
  }
  copy->train(is_training());
  return copy;
}

void ExportedImpl::train(bool on) {
  ExportedModule::train(on);
}

/// Looks only if a mode was set: a model may have thousands of modules.
void ExportedImpl::check_modes() {
  if (!*mode_was_set_) {
    return;
  }
  for (const auto& module : modules(/*include_self=*/false)) {
    const auto* part = dynamic_cast<const ExportedModule*>(module.get());
    if (part != nullptr && part->is_training() != is_training()) {
      raise<c10::ValueError>(
          {.call = "forward", .path = model_->path().native()},
          fmt::format(
              "module \"{}\" is in {} mode and the model in {} mode, but a program has one mode for the whole model. Call {} on the model, or export it with the module in that mode.",
              part->path(),
              part->is_training() ? "training" : "evaluation",
              is_training() ? "training" : "evaluation",
              is_training() ? "train()" : "eval()"));
    }
  }
  *mode_was_set_ = false;
}

void ExportedImpl::recompute_submodules(
    const std::vector<const torch::nn::Module*>& submodules,
    const RecomputeOptions& options) {
  std::vector<std::string> paths;
  for (const torch::nn::Module* submodule : submodules) {
    const auto* part = dynamic_cast<const ExportedModule*>(submodule);
    if (part == nullptr) {
      raise<c10::ValueError>(
          {.call = "apply_activation_checkpointing"},
          fmt::format(
              "{} is no module of the exported program.", submodule->name()));
    }
    paths.push_back(part->path());
  }
  model_->recompute(paths, options);
}

std::shared_ptr<ExportedModule> ExportedImpl::module_at(
    const std::string& path) {
  std::vector<std::string> known;
  for (const auto& module : modules(/*include_self=*/true)) {
    auto found = std::dynamic_pointer_cast<ExportedModule>(module);
    if (found != nullptr && found->path() == path) {
      return found;
    }
    known.push_back(found != nullptr ? found->path() : "");
  }
  raise<c10::ValueError>(
      {.call = "module_at", .path = model_->path().native()},
      fmt::format(
          "there is no module \"{}\".{}",
          path,
          state::did_you_mean(path, known)));
}

std::vector<ExportedSpec> ExportedImpl::inputs() const {
  return model_->inputs(is_training());
}

std::vector<ExportedSpec> ExportedImpl::results() const {
  return model_->results(is_training());
}

size_t ExportedImpl::num_nodes() {
  return model_->num_nodes(is_training());
}

const std::filesystem::path& ExportedImpl::file() const {
  return model_->path();
}

void ExportedImpl::convert(
    std::optional<at::Device> device,
    std::optional<at::ScalarType> dtype,
    bool non_blocking) {
  ExportedModule::convert(device, dtype, non_blocking);
  if (dtype) {
    model_->set_dtype(*dtype);
  }
}

} // namespace tessera
