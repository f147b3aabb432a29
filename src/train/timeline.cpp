#include "train/timeline.h"

#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <utility>

#include "base/digits.h"
#include "engine/module_units.h"
#include "engine/owners.h"
#include "libtorch/backward_hooks.h"

namespace tessera::train {
namespace {

constexpr const char* kOther = "other";
constexpr const char* kOptimizer = "optimizer";
constexpr double kShortest =
    1e-7; // seconds; shorter gaps between spans are ignored

/// The timeline that is told about operators.
std::atomic<Timeline*> active_timeline{nullptr};

/// "blocks.3" for "blocks.3.mlp.weight", "head" for "head.weight": a child of
/// the root, or an element of a list among these. Else the root.
std::string part_of(
    const std::string& parameter,
    const torch::nn::Module& root) {
  const size_t first = parameter.find('.');
  if (first == std::string::npos) {
    return root.name();
  }
  const size_t second = parameter.find('.', first + 1);
  const bool is_element = second != std::string::npos &&
      is_digits(std::string_view(parameter).substr(
          first + 1, second - first - 1));
  return parameter.substr(0, is_element ? second : first);
}

/// add_, _foreach_add_, _fused_adamw_.
bool is_in_place(const at::RecordFunction& function) {
  return std::string_view(function.name()).ends_with('_');
}

/// The rest of [start, end] without the waits, which are sorted and do not
/// overlap.
void cut_out(
    const TimelineSpan& span,
    const std::vector<TimelineSpan>& waits,
    std::vector<TimelineSpan>& result) {
  double start = span.start;
  const auto add = [&](double end) {
    if (end - start > kShortest) {
      result.push_back({span.lane, span.name, start, end});
    }
  };
  for (const TimelineSpan& wait : waits) {
    if (wait.end > start && wait.start < span.end) {
      add(wait.start);
      start = wait.end;
    }
  }
  add(span.end);
}

TimelineLane lane_of(const comm::Call& call) {
  return comm::verb_of(call) == std::string_view("reduce")
      ? TimelineLane::Reduce
      : TimelineLane::Gather;
}

} // namespace

Parts::Parts(const torch::nn::Module& model, const MemoryCensus& holdings) {
  for (const auto& unit : holdings.units()) {
    const std::string& name = unit->name();
    for (const engine::Bundle& bundle : unit->bundles()) {
      by_storage_.emplace(bundle.storage(), Part{Role::Full, name});
      by_storage_.emplace(
          engine::storage_of(bundle.shard()), Part{Role::Shard, name});
    }
  }
  for (const auto& param : engine::distinct_parameters(model)) {
    if (param.tensor.has_storage() &&
        engine::unit_of(param.tensor) == nullptr) {
      by_storage_.emplace(
          engine::storage_of(param.tensor),
          Part{Role::Plain, part_of(param.name, model)});
    }
  }
}

const Parts::Part* Parts::find(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) {
    return nullptr;
  }
  const auto found = by_storage_.find(engine::storage_of(tensor));
  return found == by_storage_.end() ? nullptr : &found->second;
}

std::vector<const Parts::Part*> Parts::among(
    const c10::IValue& argument) const {
  std::vector<const Part*> parts;
  const auto see = [&](const at::Tensor& tensor) {
    if (const Part* part = find(tensor)) {
      parts.push_back(part);
    }
  };
  if (argument.isTensor()) {
    see(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const at::Tensor& tensor : argument.toTensorVector()) {
      see(tensor);
    }
  }
  return parts;
}

Timeline::Timeline(const torch::nn::Module& model, const MemoryCensus& holdings)
    : parts_(model, holdings), clock_(holdings.device()) {
  current_ = {TimelineLane::Compute, kOther, clock_.on_device(), std::nullopt};
  Timeline* none = nullptr;
  TESSERA_INTERNAL_ASSERT(
      active_timeline.compare_exchange_strong(none, this),
      "two timelines at a time");
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&on_operator)
          .needsInputs(true)
          .scopes(
              {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  watch_.emplace([this](const comm::CallEvent& event) { see_call(event); });
}

Timeline::~Timeline() {
  stop_watching();
}

void Timeline::stop_watching() {
  watch_.reset();
  if (callback_) {
    at::removeCallback(*callback_);
    callback_.reset();
    active_timeline = nullptr;
  }
}

std::unique_ptr<at::ObserverContext> Timeline::on_operator(
    const at::RecordFunction& function) {
  if (Timeline* timeline = active_timeline) {
    timeline->see_operator(function);
  }
  return nullptr;
}

void Timeline::see_operator(const at::RecordFunction& function) {
  const MutexLock lock(mutex_);
  const bool in_backward = libtorch::current_backward() >= 0;
  if (in_backward && phase_ != Phase::Backward) {
    become(Phase::Backward, "backward");
  } else if (!in_backward && phase_ == Phase::Backward) {
    become(Phase::Other, kOther);
  }
  if (function.scope() != at::RecordScope::FUNCTION) {
    return;
  }
  const bool in_place = is_in_place(function);
  bool is_first = true;
  for (const c10::IValue& argument : function.inputs()) {
    for (const Parts::Part* part : parts_.among(argument)) {
      touch(*part, is_first, in_place);
    }
    is_first = false;
  }
}

void Timeline::touch(
    const Parts::Part& part,
    bool is_first_argument,
    bool writes) {
  if (phase_ == Phase::Backward) {
    if (part.role != Parts::Role::Shard) {
      become(Phase::Backward, part.name + " backward");
    }
    return;
  }
  const bool is_optimizer = part.role == Parts::Role::Shard
      ? is_first_argument && writes
      : part.role == Parts::Role::Plain && !at::GradMode::is_enabled() &&
          phase_ != Phase::Forward;
  if (is_optimizer && phase_ == Phase::Other) {
    phase_ = Phase::Optimizer; // operators since backward belong to it
    current_.name = kOptimizer;
  } else if (is_optimizer) {
    become(Phase::Optimizer, kOptimizer);
  } else if (part.role != Parts::Role::Shard) {
    become(Phase::Forward, part.name + " forward");
  }
}

void Timeline::become(Phase phase, std::string name) {
  if (phase_ == phase && current_.name == name) {
    return;
  }
  const Moment now = clock_.on_device();
  current_.end = now;
  computed_.push_back(std::move(current_));
  current_ = {TimelineLane::Compute, std::move(name), now, std::nullopt};
  phase_ = phase;
}

void Timeline::phase(const std::string& name) {
  const MutexLock lock(mutex_);
  become(Phase::Named, name);
}

void Timeline::see_call(const comm::CallEvent& event) {
  using Kind = comm::CallEvent::Kind;
  const bool is_ours = event.kind == Kind::Ended ||
      std::this_thread::get_id() == thread_ ||
      libtorch::current_backward() >= 0;
  if (!is_ours) {
    return;
  }
  const Moment now = event.on_device ? clock_.on_device() : clock_.on_host();
  const MutexLock lock(mutex_);
  const auto make = [&](TimelineLane lane) {
    return Interval{lane, comm::subject_of(event.call), now, std::nullopt};
  };
  const auto call = calls_.find(event.id);
  const auto wait = waits_.find(event.id);
  switch (event.kind) {
    case Kind::Starts:
      calls_.emplace(event.id, make(lane_of(event.call)));
      break;
    case Kind::Ended:
      if (call != calls_.end()) {
        call->second.end = now;
      }
      break;
    case Kind::WaitStarts:
      waits_.emplace(event.id, make(TimelineLane::Wait));
      break;
    case Kind::WaitEnded:
      if (wait != waits_.end()) {
        wait->second.end = now;
        waited_.push_back(std::move(wait->second));
        waits_.erase(wait);
      }
      break;
  }
}

bool is_timeline_active() {
  return active_timeline != nullptr;
}

std::vector<TimelineSpan> Timeline::finish() {
  stop_watching();
  const MutexLock lock(mutex_);
  current_.end = clock_.on_device();
  computed_.push_back(std::move(current_));
  clock_.finish();
  return resolve();
}

std::vector<TimelineSpan> Timeline::resolve() const {
  const double last = clock_.seconds(*computed_.back().end);
  const auto span_of = [&](const Interval& interval) {
    const double start = clock_.seconds(interval.start);
    const double end = interval.end ? clock_.seconds(*interval.end) : last;
    return TimelineSpan{
        interval.lane, interval.name, start, std::max(start, end)};
  };
  const auto by_start = [](const TimelineSpan& a, const TimelineSpan& b) {
    return a.start < b.start;
  };
  std::vector<TimelineSpan> waits;
  for (const Interval& interval : waited_) {
    const TimelineSpan span = span_of(interval);
    if (span.end - span.start > kShortest) {
      waits.push_back(span);
    }
  }
  std::sort(waits.begin(), waits.end(), by_start);
  std::vector<TimelineSpan> spans = waits;
  for (const auto& [id, interval] : calls_) {
    spans.push_back(span_of(interval));
  }
  for (const Interval& interval : computed_) {
    cut_out(span_of(interval), waits, spans);
  }
  std::stable_sort(spans.begin(), spans.end(), by_start);
  return spans;
}

} // namespace tessera::train
