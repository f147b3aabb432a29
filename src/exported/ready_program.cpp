#include <tessera/error.h>
#include <tessera/recompute/recompute.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "exported/fold_constants.h"
#include "exported/loaded_model.h"
#include "exported/memory_roots.h"
#include "exported/payload_file.h"
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

/// Weights that nodes change in place, other than parameters that are trained:
/// a copy of such a parameter would get its gradient.
std::set<uint32_t> changing_weights(const Code& code, const ModelFile& file) {
  const Writes writes = writes_of(code);
  std::set<uint32_t> result;
  for (const uint32_t weight : writes.weights) {
    if (!is_trained(file.weights[weight])) {
      result.insert(weight);
    }
  }
  for (const uint32_t weight : writes.perhaps) {
    if (file.weights[weight].kind != WeightSpec::Kind::Parameter) {
      result.insert(weight);
    }
  }
  return result;
}

/// The modules that the steps belong to.
std::set<std::string> modules_of(const Code& code) {
  std::set<std::string> result;
  for (const auto& step : code.steps) {
    if (step->node != nullptr) {
      for (const ModuleFrame& frame : step->node->modules) {
        result.insert(frame.path);
      }
    }
  }
  return result;
}

} // namespace

std::shared_ptr<ReadyProgram> Model::compiled(
    const ModelProgram& program) const {
  Refusals refusals;
  auto made = compiled(program, refusals);
  refuse_all(refusals, file_->path.native());
  return made;
}

/// The program as it stands in the file.
std::shared_ptr<ReadyProgram> Model::compiled(
    const ModelProgram& program,
    Refusals& refusals) const {
  auto made = std::make_shared<ReadyProgram>();
  made->code = compile(program.program, program.weights, placement_, refusals);
  if (!refusals.missing.empty() || !refusals.others.empty()) {
    return made;
  }
  made->outputs = outputs_of(program, *file_);
  if (made->outputs.size() != made->code.outputs.size()) {
    raise<c10::NotImplementedError>(
        {.call = "load_exported", .path = file_->path.native()},
        "the program returns a different number of results than it declares. Export the model again.");
  }
  made->modules = modules_of(made->code);
  return made;
}

/// With what is computed once, and what is recomputed.
std::shared_ptr<const ReadyProgram> Model::make_ready(
    std::shared_ptr<ReadyProgram> compiled,
    const ModelProgram& program,
    const RecomputedModules& recomputed) const {
  Code& code = compiled->code;
  fold_constants(
      code, program.program.graph, {weights_, is_fixed_, placement_.device});
  std::set<uint32_t> changing = changing_weights(code, *file_);
  compiled->written_weights.assign(changing.begin(), changing.end());
  const Writes writes = writes_of(code);
  compiled->writes_parameters = !std::includes(
      changing.begin(),
      changing.end(),
      writes.weights.begin(),
      writes.weights.end());
  recompute_regions(code, recomputed, changing);
  for (const ReadyProgram::Output& output : compiled->outputs) {
    if (output.kind == OutputSpec::Kind::BufferMutation) {
      const auto target = static_cast<uint32_t>(output.target);
      compiled->replaced_weights.push_back(target);
      changing.insert(target);
    }
  }
  const std::set<uint32_t> read = weights_read(code);
  std::set_intersection(
      changing.begin(),
      changing.end(),
      read.begin(),
      read.end(),
      std::back_inserter(compiled->state_weights));
  return compiled;
}

std::shared_ptr<const ReadyProgram> Model::ready(const ModelProgram& program) {
  const std::lock_guard lock(mutex_);
  follow_placement();
  auto& made = ready_[&program];
  if (made == nullptr) {
    auto unused = compiled_.extract(&program);
    made = make_ready(
        unused.empty() ? compiled(program) : std::move(unused.mapped()),
        program,
        recomputed_);
  }
  return made;
}

/// Forgets the codes if the parameters have gone elsewhere since.
void Model::follow_placement() {
  const Placement now = placement_now();
  if (now != placement_) {
    compiled_.clear();
    ready_.clear();
    move_constants(now.device);
    placement_ = now;
  }
}

/// Where the parameters are, or, if there are none, the constants.
Placement Model::placement_now() const {
  Placement result;
  if (!weights_->empty()) {
    result.device = weights_->front().device();
    result.exported_type = file_->weights.front().payload->meta.device.type;
  }
  result.dtype = dtype_;
  result.default_dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  return result;
}

void Model::move_constants(at::Device device) {
  if (file_->num_constants == 0 || device.is_meta()) {
    return;
  }
  auto moved = std::make_shared<std::vector<at::Tensor>>(*weights_);
  const std::string& type = file_->weights.front().payload->meta.device.type;
  MemoryCopies copies(device);
  for (size_t i = moved->size() - file_->num_constants; i < moved->size();
       ++i) {
    if (file_->weights[i].payload->meta.device.type == type &&
        (*moved)[i].device() != device) {
      (*moved)[i] = copies.copy((*moved)[i]);
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
  follow_placement();
  decltype(ready_) made;
  for (const auto& program : programs_) {
    try {
      made[program.get()] = make_ready(compiled(*program), *program, more);
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
          return each.second->modules.contains(path);
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
/// that nodes change, so that statistics count a batch once; of those that
/// results depend on, the values from before the first run. In a run that
/// backward follows, those that get new values afterwards: nodes keep the old
/// ones for backward.
RunScope Model::scope(const Forward& forward) {
  const ReadyProgram& ready = *forward.ready;
  if (is_recomputing() && ready.writes_parameters) {
    raise(
        {.call = "forward", .path = file_->path.native()},
        "the program changes a parameter in place, so it cannot be run a second time. Do not put it under recompute().");
  }
  const bool is_followed = at::GradMode::is_enabled();
  std::vector<uint32_t> copied;
  if (is_recomputing()) {
    copied = ready.written_weights;
  }
  if (is_followed) {
    copied.insert(
        copied.end(),
        ready.replaced_weights.begin(),
        ready.replaced_weights.end());
  }
  if (copied.empty() && ready.state_weights.empty()) {
    return {weights_, forward.ready};
  }
  const at::NoGradGuard no_grad;
  auto weights = std::make_shared<std::vector<at::Tensor>>(*weights_);
  if (is_followed && !ready.state_weights.empty()) {
    const StateBefore before = state_before(forward);
    for (size_t i = 0; i < ready.state_weights.size() && is_recomputing();
         ++i) {
      (*weights)[ready.state_weights[i]] = before.values[i];
    }
  }
  for (const uint32_t index : copied) {
    (*weights)[index] = (*weights)[index].clone();
  }
  return {std::move(weights), forward.ready};
}

/// The state before this run; in the second run of a recomputed model, the
/// state before the first run. Nothing but their inputs ties the two runs
/// together, so the second run must follow the forward that it belongs to.
StateBefore Model::state_before(const Forward& forward) {
  StateBefore now;
  for (const c10::IValue& input : forward.inputs) {
    if (input.isTensor() && input.toTensor().has_storage()) {
      now.inputs.push_back(input.toTensor().storage().unsafeGetStorageImpl());
    }
  }
  const std::lock_guard lock(mutex_);
  StateBefore& last = before_[forward.program];
  const auto& state = forward.ready->state_weights;
  const bool is_same =
      last.values.size() == state.size() && last.inputs == now.inputs;
  if (!is_recomputing()) {
    for (const uint32_t index : state) {
      now.values.push_back((*weights_)[index].clone());
    }
    now.is_unsure = is_same && !last.was_used;
    last = std::move(now);
  } else if (!is_same || last.is_unsure) {
    raise(
        {.call = "forward",
         .parameter = file_->weights[state.front()].path,
         .path = file_->path.native()},
        "the model computes with this buffer and changes it, and it was run again since the run that recompute() repeats, so its value from before that run is gone. Run backward before the next forward, or recompute submodules with apply_activation_checkpointing(), which keeps the values of each call.");
  } else {
    last.was_used = true;
  }
  return last;
}

size_t Model::num_nodes(bool is_training) {
  return num_steps(ready(program_for(is_training))->code);
}

void Model::prepare() {
  const std::lock_guard lock(mutex_);
  follow_placement();
  Refusals refusals; // of all programs
  std::vector<const Code*> codes;
  for (const auto& program : programs_) {
    auto& made = compiled_[program.get()];
    made = compiled(*program, refusals);
    codes.push_back(&made->code);
  }
  refuse_all(refusals, file_->path.native());
  is_fixed_ = fixed_weights(file_->weights, *weights_, codes);
}

} // namespace tessera::exported
