// Recording a step once, and making it again without the host: see [Note:
// captured steps] in captured_step.cpp.
#pragma once

#include <tessera/train/captured_step.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "libtorch/recording.h"
#include "train/captured/device_rates.h"
#include "train/captured/step_effects.h"
#include "train/captured/step_graph.h"
#include "train/captured/step_kind.h"

namespace tessera::train {

using HostParts = std::vector<libtorch::RecordingScope::Part>;

/// A step that can be made again.
struct RecordedStep {
  std::vector<at::Tensor> inputs; // where the graph reads them
  std::unique_ptr<StepGraph> graph;
  at::Tensor output; // where the graph writes it
  StepEffects effects;
  HostParts host_parts;
  std::vector<std::function<void()>> host_effects; // of these parts
  uint64_t collectives = 0; // see Recording
  int64_t last_use = 0; // number of a call

  /// Whether all host parts live; if not, the step cannot be replayed.
  bool lives() const;
  /// Whether they have the settings that they were recorded with, too.
  bool holds() const;
  /// Makes the step with these inputs, which are of its kind.
  at::Tensor replay(const std::vector<at::Tensor>& given);
};

/// What is recorded.
struct StepToRecord {
  const StepParts& parts;
  GraphDevice& device;
  DeviceRates& rates;
  const CapturedStep::Function& function;
};

/// Records the function over copies of the inputs, while `watch` looks at what
/// it does. If it throws, the device and the generators are as before; the
/// caller undoes the rest, and tells `host_parts`, who took part.
std::unique_ptr<RecordedStep> record_step(
    const StepToRecord& step,
    const std::vector<at::Tensor>& inputs,
    const EffectsWatch& watch,
    HostParts& host_parts);

/// Runs `work` on the recording stream, and the backwards in it. Autograd's
/// nodes that live from step to step run where they were made, so they are
/// moved there, and afterwards back to the caller's stream.
void on_recording_stream(
    GraphDevice& device,
    const StepParts& parts,
    const std::function<void()>& work);

/// Without the backtrace that LibTorch adds.
std::string text_of(const std::exception& error);

} // namespace tessera::train
