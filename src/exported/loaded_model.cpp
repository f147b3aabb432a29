#include "exported/loaded_model.h"

#include <tessera/error.h>
#include <tessera/recompute/recompute.h>

#include <ATen/core/grad_mode.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <set>
#include <unordered_map>
#include <utility>

#include "exported/operator_name.h"
#include "exported/payload_file.h"

namespace tessera::exported {
namespace {

/// The path without its last segment, and that segment.
std::pair<std::string, std::string> split_path(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == path.npos
      ? std::pair(std::string(), path)
      : std::pair(path.substr(0, dot), path.substr(dot + 1));
}

using ClassNames = std::unordered_map<std::string, std::string>;

void collect_classes(const Graph& graph, ClassNames& classes) {
  for (const Node& node : graph.nodes) {
    for (const ModuleFrame& frame : node.modules) {
      classes.try_emplace(frame.path, frame.class_name);
    }
    for (const NamedArgument& input : node.inputs) {
      const auto* nested = std::get_if<NestedGraph>(&input.argument.value);
      if (nested != nullptr && nested->graph != nullptr) {
        collect_classes(*nested->graph, classes);
      }
    }
  }
}

/// Python's name of a module that is called a second time: "l@1".
std::string without_call(const std::string& path) {
  return path.substr(0, path.find('@'));
}

} // namespace

Model::Model(
    std::shared_ptr<const ModelFile> file,
    Programs programs,
    std::vector<at::Tensor> weights)
    : file_(std::move(file)),
      programs_(std::move(programs)),
      weights_(
          std::make_shared<const std::vector<at::Tensor>>(std::move(weights))) {
}

void Model::build(ExportedImpl& root) const {
  ClassNames classes;
  for (const auto& program : programs_) {
    collect_classes(program->program.graph, classes);
  }
  root.class_name_ = classes[""];
  root.mode_was_set_ = std::make_shared<std::atomic<bool>>(false);
  std::unordered_map<std::string, ExportedModule*> modules{{"", &root}};
  const auto module_at = [&](const auto& self,
                             const std::string& path) -> ExportedModule& {
    const auto found = modules.find(path);
    if (found != modules.end()) {
      return *found->second;
    }
    const auto [parent, name] = split_path(path);
    const auto made = std::make_shared<ExportedModule>(path, classes[path]);
    made->mode_was_set_ = root.mode_was_set_;
    self(self, parent).register_module(name, made);
    modules[path] = made.get();
    return *made;
  };
  // The calls are in Python's order of modules.
  for (const auto& program : programs_) {
    for (const ModuleCall& call : program->program.module_calls) {
      module_at(module_at, without_call(call.path));
    }
  }
  for (size_t i = 0; i < weights_->size(); ++i) {
    const WeightSpec& spec = file_->weights[i];
    const auto [path, name] = split_path(spec.path);
    if (spec.kind == WeightSpec::Kind::Parameter) {
      module_at(module_at, path)
          .register_parameter(
              name, (*weights_)[i], spec.payload->meta.requires_grad);
    } else if (spec.kind == WeightSpec::Kind::Buffer) {
      ExportedModule& module = module_at(module_at, path);
      module.register_buffer(name, (*weights_)[i]);
      if (!spec.is_persistent) {
        module.transient_.insert(name);
      }
    }
  }
}

bool Model::begins_in_training() const {
  return programs_.size() > 1 || programs_.front()->frozen.fits(true);
}

const ModelProgram& Model::program_for(bool is_training) const {
  if (!is_training && programs_.size() > 1) {
    return *programs_.back();
  }
  const ModelProgram& program = *programs_.front();
  if (!program.frozen.fits(is_training)) {
    raise<c10::ValueError>(
        {.call = "forward", .path = file_->path.native()},
        fmt::format(
            "the model is in {} mode, but the file has one program only, which was exported in {} mode: {}. Call {}, or write a file for both modes with tessera_export.py.",
            is_training ? "training" : "evaluation",
            is_training ? "evaluation" : "training",
            program.frozen.operators(!is_training),
            is_training ? "eval()" : "train()"));
  }
  return program;
}

Model::Forward Model::begin(const ExportedArgs& args, bool is_training) {
  const ModelProgram& program = program_for(is_training);
  if (!weights_->empty() && weights_->front().is_meta()) {
    raise(
        {.call = "forward", .path = file_->path.native()},
        "the parameters have no values yet. Call fully_shard() or materialize() on the model first.");
  }
  check_shared();
  return {&program, ready(program), program.signature.flatten(args, dtype_)};
}

/// Whether two tensors still have in common what they had in the file.
bool Model::still_share(const SharedMemory& shared) const {
  const at::Tensor& one = (*weights_)[shared.one];
  const at::Tensor& other = (*weights_)[shared.other];
  // storage() refuses a sharded parameter.
  const auto memory_of = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()
        ->unsafe_storage()
        .unsafeGetStorageImpl();
  };
  const auto first_byte = [](const at::Tensor& tensor) {
    return tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  };
  const auto written_byte = [&](size_t weight) {
    const TensorMeta& meta = file_->weights[weight].payload->meta;
    return std::get<int64_t>(meta.storage_offset.value) *
        static_cast<int64_t>(c10::elementSize(to_scalar_type(meta.dtype)));
  };
  return one.has_storage() && other.has_storage() &&
      memory_of(one) == memory_of(other) &&
      first_byte(one) - first_byte(other) ==
      written_byte(shared.one) - written_byte(shared.other);
}

/// A step of an optimizer must change both.
void Model::check_shared() const {
  for (const SharedMemory& shared : file_->shared) {
    const bool learns = is_trained(file_->weights[shared.one]) ||
        is_trained(file_->weights[shared.other]);
    if (learns && !still_share(shared)) {
      raise(
          {.call = "forward", .path = file_->path.native()},
          fmt::format(
              "{} shared their memory at the export, so that a step changed both. They no longer share it: sharding, to() or set_data() gave each its own memory. Compute the one from the other in Python's forward(), or leave the model as it was loaded.",
              describe(shared, file_->weights)));
    }
  }
}

ExportedValue Model::run(const Forward& forward) {
  const ReadyProgram& ready = *forward.ready;
  const std::vector<c10::IValue> outputs =
      exported::run(ready.code, scope(forward), forward.inputs);
  std::vector<c10::IValue> results;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (ready.outputs[i].kind == OutputSpec::Kind::User) {
      results.push_back(outputs[i]);
    }
  }
  write_back(ready, forward.inputs, outputs);
  return forward.program->signature.unflatten(results);
}

/// Buffers that the program gives anew, and inputs that it changes.
void Model::write_back(
    const ReadyProgram& ready,
    const std::vector<c10::IValue>& inputs,
    const std::vector<c10::IValue>& outputs) const {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const ReadyProgram::Output& output = ready.outputs[i];
    if (output.kind == OutputSpec::Kind::BufferMutation) {
      if (!is_recomputing()) { // once per step
        const at::NoGradGuard no_grad;
        (*weights_)[output.target].copy_(outputs[i].toTensor());
      }
    } else if (output.kind == OutputSpec::Kind::UserInputMutation) {
      inputs[output.target].toTensor().copy_(outputs[i].toTensor());
    }
  }
}

std::unique_ptr<Model> Model::copy(
    const std::optional<at::Device>& device) const {
  const at::NoGradGuard no_grad;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> copies;
  MemoryCopies memory(device);
  std::set<size_t> together;
  for (const SharedMemory& shared : file_->shared) {
    if (still_share(shared)) {
      together.insert({shared.one, shared.other});
    }
  }
  std::vector<at::Tensor> weights;
  for (size_t i = 0; i < weights_->size(); ++i) {
    const at::Tensor& weight = (*weights_)[i];
    at::Tensor& made = copies[weight.unsafeGetTensorImpl()];
    if (file_->weights[i].kind == WeightSpec::Kind::Constant) {
      made = memory.copy(weight);
    } else if (!made.defined() && together.contains(i)) {
      made = memory.copy(weight);
    } else if (!made.defined()) {
      made = weight.detach().clone();
      made = device ? made.to(*device) : made;
    }
    weights.push_back(made);
  }
  auto result = std::make_unique<Model>(file_, programs_, std::move(weights));
  result->is_fixed_ = is_fixed_;
  result->dtype_ = dtype_;
  result->recomputed_ = recomputed_;
  return result;
}

void Model::set_dtype(at::ScalarType dtype) {
  dtype_ = dtype;
}

} // namespace tessera::exported
