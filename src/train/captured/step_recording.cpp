#include "train/captured/step_recording.h"

#include <tessera/error.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "engine/schedule.h"
#include "engine/unit.h"
#include "libtorch/backward_stream.h"
#include "train/captured/operator_watch.h"

namespace tessera::train {
namespace {

std::vector<int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> versions;
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.defined() ? tensor._version() : 0);
  }
  return versions;
}

/// Errors of LibTorch may end without a full stop, and those of CUDA go on with
/// advice about other errors.
std::string sentence_of(const std::exception& error) {
  std::string text = text_of(error);
  text = text.substr(0, text.find('\n'));
  if (text.empty() || text.back() != '.') {
    text += '.';
  }
  return text;
}

/// The host's own generator, which a replay does not advance.
class HostGenerator {
 public:
  HostGenerator() : before_(state()) {}
  bool has_moved() const {
    return !before_.equal(state());
  }
  void restore() const {
    if (!has_moved()) {
      return; // others may draw from it at the same time
    }
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const std::scoped_lock lock(generator.mutex());
    generator.set_state(before_);
  }

 private:
  static at::Tensor state() {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const std::scoped_lock lock(generator.mutex());
    return generator.get_state();
  }

  const at::Tensor before_;
};

/// From now on on the current stream.
void run_backwards_here(const StepParts& parts) {
  for (const auto& unit : parts.units) {
    unit->params().run_backward_on_current_stream();
  }
  for (const at::Tensor& leaf : parts.leaves) {
    if (leaf.requires_grad()) {
      libtorch::use_current_stream(leaf);
    }
  }
}

/// What a recording uses is its own: nothing that was gathered or cast before
/// it, and nothing of it is there afterwards.
void let_go(const StepParts& parts) {
  for (const auto& unit : parts.units) {
    unit->schedule().reshard(*unit);
    unit->forget_casts();
    unit->schedule().pool().trim(0);
  }
  at::autocast::clear_cache();
}

/// Runs the function on the recording stream.
void record_function(
    const StepToRecord& step,
    RecordedStep& recorded,
    HostParts& host_parts) {
  StepGraph& graph = *recorded.graph;
  let_go(step.parts);
  std::unordered_set<const void*> known;
  for (const auto& unit : step.parts.units) {
    known.insert(unit.get());
  }
  const libtorch::RecordingScope scope(graph, std::move(known));
  const auto keep = c10::make_scope_exit([&] { host_parts = scope.parts(); });
  for (ddp::Reducer* reducer : step.parts.reducers()) {
    libtorch::take_part_in_recording(reducer->host_part());
  }
  try {
    graph.begin();
    const auto versions = versions_of(recorded.inputs);
    const at::Tensor output = step.function(recorded.inputs);
    recorded.output = output.defined() ? output.detach() : output;
    if (versions_of(recorded.inputs) != versions) {
      raise(
          {.call = kCapturedStep},
          "the step writes to one of its inputs, and a replay would write to its own copy of it. Return the new values, or keep them in a buffer of the model.");
    }
    let_go(step.parts);
    graph.end();
    recorded.collectives = graph.collectives();
  } catch (...) {
    graph.abandon();
    at::autocast::clear_cache();
    throw;
  }
}

} // namespace

bool RecordedStep::lives() const {
  return std::all_of(
      host_parts.begin(), host_parts.end(), [](const auto& entry) {
        return entry.part.lives();
      });
}

bool RecordedStep::holds() const {
  return std::all_of(
      host_parts.begin(), host_parts.end(), [](const auto& entry) {
        return entry.part.lives() && entry.part.settings() == entry.settings;
      });
}

at::Tensor RecordedStep::replay(const std::vector<at::Tensor>& given) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i].defined()) {
      inputs[i].copy_(given[i], /*non_blocking=*/true);
    }
  }
  effects.before_replay();
  graph->replay();
  effects.after_replay();
  for (const auto& effect : host_effects) {
    effect();
  }
  return output.defined() ? output.clone() : at::Tensor();
}

void on_recording_stream(
    GraphDevice& device,
    const StepParts& parts,
    const std::function<void()>& work) {
  try {
    device.on_recording_stream([&] {
      run_backwards_here(parts);
      work();
    });
  } catch (...) {
    run_backwards_here(parts);
    throw;
  }
  run_backwards_here(parts);
}

std::unique_ptr<RecordedStep> record_step(
    const StepToRecord& step,
    const std::vector<at::Tensor>& inputs,
    const EffectsWatch& watch,
    HostParts& host_parts) {
  auto recorded = std::make_unique<RecordedStep>();
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) {
      raise(
          {.call = kCapturedStep},
          "an input requires a gradient, which a replay would compute for its own copy of the input. Pass inputs that are detached.");
    }
    recorded->inputs.push_back(input.defined() ? input.clone() : input);
  }
  recorded->graph = step.device.make_graph();
  const HostGenerator host_generator;
  const OperatorWatch operators(watch.old_gradients());
  std::string last; // before what follows a failure
  try {
    const DeviceRates::Scope on_device(step.rates);
    on_recording_stream(step.device, step.parts, [&] {
      const auto keep = c10::make_scope_exit([&] { last = operators.last(); });
      record_function(step, *recorded, host_parts);
    });
  } catch (const std::exception& error) {
    host_generator.restore();
    raise(
        {.call = kCapturedStep},
        last.empty() ? sentence_of(error)
                     : fmt::format(
                           "{} The last operator that began is {}.",
                           sentence_of(error),
                           last));
  }
  if (!step.device.device().is_cpu() && host_generator.has_moved()) {
    host_generator.restore();
    raise(
        {.call = kCapturedStep},
        "the step, or a thread beside it, draws random numbers on the CPU, and a replay would repeat them. Draw them on the device, or pass them as an input.");
  }
  for (const auto& entry : host_parts) {
    recorded->host_effects.push_back(entry.part.finish());
  }
  recorded->host_parts = host_parts;
  recorded->effects = watch.finish(operators.first_user());
  return recorded;
}

std::string text_of(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  return own != nullptr ? own->what_without_backtrace() : error.what();
}

} // namespace tessera::train
