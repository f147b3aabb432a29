#include <tessera/error.h>
#include <tessera/train/monitor.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "engine/unit_memory.h"
#include "train/cpu_memory.h"
#include "train/memory_census.h"
#include "train/peak.h"
#include "train/timeline.h"

namespace tessera {
namespace {

/// The monitor that is inside a step: LibTorch's callbacks have no other way to
/// find it.
std::atomic<const void*> inside_step{nullptr};

UnitInfo info_of(const engine::Unit& unit) {
  UnitInfo info{.name = unit.name()};
  for (const engine::Bundle& bundle : unit.bundles()) {
    const engine::Layout& layout = bundle.layout();
    for (size_t index = 0; index < layout.num_params(); ++index) {
      info.parameters += layout.numel(index);
    }
    info.full_bytes += static_cast<int64_t>(
        static_cast<size_t>(bundle.full().numel()) *
        bundle.full().element_size());
  }
  info.shard_bytes = static_cast<int64_t>(engine::shard_bytes(unit));
  return info;
}

} // namespace

const char* lane_name(TimelineLane lane) {
  switch (lane) {
    case TimelineLane::Compute:
      return "compute";
    case TimelineLane::Gather:
      return "gather";
    case TimelineLane::Reduce:
      return "reduce";
    case TimelineLane::Wait:
      return "wait";
  }
  TESSERA_INTERNAL_ASSERT(false, "a lane without a name");
}

struct StepMonitor::Impl {
  struct Step {
    std::chrono::steady_clock::time_point start;
    std::optional<train::Peak> peak;
    std::optional<train::Timeline> timeline;
  };

  Impl(torch::nn::Module& module, OptimizerRefs optimizers)
      : model(module), holdings(module, std::move(optimizers)) {
    if (holdings.device().is_cpu()) {
      train::CpuMemory::instance(); // counts from here on
    }
  }
  ~Impl() {
    leave();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void leave() {
    step.reset();
    const void* self = this;
    inside_step.compare_exchange_strong(self, nullptr);
  }

  torch::nn::Module& model;
  train::MemoryCensus holdings;
  std::optional<Step> step;
};

StepMonitor::StepMonitor(ModuleRef model, OptimizerRefs optimizers)
    : impl_(std::make_unique<Impl>(model, std::move(optimizers))) {}

StepMonitor::~StepMonitor() = default;

void StepMonitor::begin_step(const MonitorOptions& options) {
  impl_->leave();
  const void* nobody = nullptr;
  if (!inside_step.compare_exchange_strong(nobody, impl_.get())) {
    raise(
        {.call = "StepMonitor::begin_step"},
        "another monitor of this process is inside a step. End that one first.");
  }
  auto& step = impl_->step.emplace();
  step.peak.emplace(impl_->holdings);
  if (options.timeline()) {
    step.timeline.emplace(impl_->model, impl_->holdings);
  }
  step.start = std::chrono::steady_clock::now();
}

void StepMonitor::phase(const std::string& name) {
  if (impl_->step && impl_->step->timeline) {
    impl_->step->timeline->phase(name);
  }
}

StepReport StepMonitor::end_step() {
  if (!impl_->step) {
    raise(
        {.call = "StepMonitor::end_step"},
        "no step has begun. Call begin_step() first.");
  }
  auto& step = *impl_->step;
  StepReport report;
  report.seconds = std::chrono::duration<double>(
                       std::chrono::steady_clock::now() - step.start)
                       .count();
  if (step.timeline) {
    report.spans = step.timeline->finish();
  }
  for (const TimelineSpan& span :
       report.spans) { // of the GPU, to its last kernel
    report.seconds = std::max(report.seconds, span.end);
  }
  report.memory = step.peak->finish();
  impl_->leave();
  return report;
}

std::vector<UnitInfo> StepMonitor::units() const {
  std::vector<UnitInfo> result;
  for (const auto& unit : impl_->holdings.units()) {
    if (!unit->bundles().empty()) {
      result.push_back(info_of(*unit));
    }
  }
  return result;
}

} // namespace tessera
