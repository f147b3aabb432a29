#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "exported/model.h"

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
    auto fresh = std::make_shared<ReadyProgram>();
    fresh->code =
        compile(program.program, program.weights, now, file_->path.native());
    fresh->outputs = outputs_of(program, *file_);
    made = std::move(fresh);
  }
  return made;
}

/// Where the parameters are, or, if there are none, the constants.
Placement Model::placement_now() const {
  Placement result;
  if (!weights_.empty()) {
    result.device = weights_.front().device();
    result.exported_type = file_->weights.front().payload->meta.device.type;
  }
  result.dtype = dtype_;
  return result;
}

void Model::move_constants(at::Device device) {
  const size_t first = weights_.size() - file_->num_constants;
  for (size_t i = first; i < weights_.size(); ++i) {
    const Device& exported = file_->weights[i].payload->meta.device;
    if (exported.type == file_->weights.front().payload->meta.device.type) {
      weights_[i] = weights_[i].to(device);
    }
  }
}

void Model::prepare() {
  for (const auto& program : programs_) {
    ready(*program);
  }
}

} // namespace tessera::exported
