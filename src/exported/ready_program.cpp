#include <tessera/error.h>
#include <tessera/recompute/recompute.h>

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>

#include "exported/model.h"
#include "exported/writes.h"

namespace tessera::exported {
namespace {

/// What is done with each value that a program gives.
std::vector<ReadyProgram::Output> outputs_of(
    const ModelProgram& program,
    const ModelFile& file) {
  const auto weight_at = [&](const std::string& path) {
    for (size_t i = 0; i < file.weights.size(); ++i) {
      if (file.weights[i].path == path &&
          file.weights[i].kind != WeightSpec::Kind::Constant) {
        return i;
      }
    }
    raise<c10::NotImplementedError>(
        {.call = "load_exported", .path = file.path.native()},
        fmt::format("the program changes \"{}\", which it lacks.", path));
  };
  std::vector<ReadyProgram::Output> result;
  for (const OutputSpec& output : program.program.outputs) {
    switch (output.kind) {
      case OutputSpec::Kind::User:
      case OutputSpec::Kind::Loss:
        result.push_back({OutputSpec::Kind::User, 0});
        continue;
      case OutputSpec::Kind::BufferMutation:
      case OutputSpec::Kind::ParameterMutation:
        result.push_back(
            {OutputSpec::Kind::BufferMutation, weight_at(output.path)});
        continue;
      case OutputSpec::Kind::UserInputMutation:
        result.push_back({output.kind, program.signature.leaf_at(output.path)});
        continue;
      case OutputSpec::Kind::GradientToParameter:
      case OutputSpec::Kind::GradientToUserInput:
      case OutputSpec::Kind::Token:
        break;
    }
    raise<c10::NotImplementedError>(
        {.call = "load_exported", .path = file.path.native()},
        "the program gives gradients or tokens of its own: it was not exported by torch.export.export. Export the model itself.");
  }
  return result;
}

} // namespace

std::shared_ptr<const ReadyProgram> Model::make_ready(
    const ModelProgram& program,
    const Placement& placement,
    const RecomputedModules& recomputed) const {
  auto made = std::make_shared<ReadyProgram>();
  made->code = compile(
      program.program, program.weights, placement, file_->path.native());
  made->outputs = outputs_of(program, *file_);
  if (made->outputs.size() != made->code.outputs.size()) {
    raise<c10::NotImplementedError>(
        {.call = "load_exported", .path = file_->path.native()},
        "the program gives another number of results than it says. Export the model again.");
  }
  const Writes writes = writes_of(made->code);
  made->written_weights.assign(writes.weights.begin(), writes.weights.end());
  for (const ReadyProgram::Output& output : made->outputs) {
    if (output.kind == OutputSpec::Kind::BufferMutation) {
      made->replaced_weights.push_back(static_cast<uint32_t>(output.target));
    }
  }
  made->recomputed = recompute_regions(made->code, recomputed);
  return made;
}

std::shared_ptr<const ReadyProgram> Model::ready(const ModelProgram& program) {
  const std::lock_guard lock(mutex_);
  const Placement now = placement_now();
  if (now != placement_) {
    ready_.clear();
    move_constants(now.device);
    placement_ = now;
  }
  auto& made = ready_[&program];
  if (made == nullptr) {
    made = make_ready(program, now, recomputed_);
  }
  return made;
}

/// Where the parameters are, or, if there are none, the constants.
Placement Model::placement_now() const {
  Placement result;
  if (!weights_->empty()) {
    result.device = weights_->front().device();
    result.exported_type = file_->weights.front().payload->meta.device.type;
  }
  result.dtype = dtype_;
  return result;
}

void Model::move_constants(at::Device device) {
  if (file_->num_constants == 0 || device.is_meta()) {
    return;
  }
  auto moved = std::make_shared<std::vector<at::Tensor>>(*weights_);
  const std::string& type = file_->weights.front().payload->meta.device.type;
  for (size_t i = moved->size() - file_->num_constants; i < moved->size();
       ++i) {
    if (file_->weights[i].payload->meta.device.type == type) {
      (*moved)[i] = (*moved)[i].to(device);
    }
  }
  weights_ = std::move(moved);
}

void Model::recompute(
    const std::vector<std::string>& paths,
    const RecomputeOptions& options) {
  RecomputedModules more = recomputed_;
  for (const std::string& path : paths) {
    more[path] = options;
  }
  const std::lock_guard lock(mutex_);
  decltype(ready_) made;
  for (const auto& program : programs_) {
    try {
      made[program.get()] = make_ready(*program, placement_now(), more);
    } catch (const RefusedRegion& refused) {
      raise(
          {.call = "apply_activation_checkpointing",
           .path = file_->path.native()},
          fmt::format(
              "{}. Choose the modules inside it, or the module around it.",
              refused.what()));
    }
  }
  for (const std::string& path : paths) {
    const bool has_nodes =
        std::any_of(made.begin(), made.end(), [&](const auto& each) {
          return each.second->recomputed.contains(path);
        });
    if (!has_nodes) {
      raise<c10::ValueError>(
          {.call = "apply_activation_checkpointing",
           .path = file_->path.native()},
          fmt::format(
              "no node of the program is of module \"{}\", so there is nothing to recompute. (Nodes under torch.no_grad or torch.autocast count for the module around them.) Choose other modules.",
              path));
    }
  }
  recomputed_ = std::move(more);
  ready_ = std::move(made);
}

/// Some buffers are copies for one run. In a second run of recompute(), those
/// that nodes change, so that statistics count a batch once. In a run that
/// backward follows, those that get new values afterwards: nodes keep the old
/// ones for backward.
RunScope Model::scope(const std::shared_ptr<const ReadyProgram>& ready) const {
  std::vector<uint32_t> copied;
  if (is_recomputing()) {
    copied = ready->written_weights;
  }
  if (at::GradMode::is_enabled()) {
    copied.insert(
        copied.end(),
        ready->replaced_weights.begin(),
        ready->replaced_weights.end());
  }
  if (copied.empty()) {
    return {weights_, ready};
  }
  auto weights = std::make_shared<std::vector<at::Tensor>>(*weights_);
  for (const uint32_t index : copied) {
    const at::NoGradGuard no_grad;
    (*weights)[index] = (*weights)[index].clone();
  }
  return {std::move(weights), ready};
}

void Model::prepare() {
  for (const auto& program : programs_) {
    ready(*program);
  }
}

} // namespace tessera::exported
