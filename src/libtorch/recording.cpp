#include "libtorch/recording.h"

#include <tessera/error.h>

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "base/fnv.h"

namespace tessera::libtorch {
namespace {

std::atomic<RecordingScope*>& under_way() {
  static std::atomic<RecordingScope*> scope{nullptr};
  return scope;
}

Recording* recording_under_way() {
  RecordingScope* scope = under_way();
  return scope == nullptr ? nullptr : &scope->recording();
}

thread_local RecordingScope* recorded_here = nullptr;

} // namespace

/// Autograd has threads of its own for the backward of a device.
bool is_recorded_here() {
  return recorded_here != nullptr ||
      (under_way() != nullptr &&
       torch::autograd::get_current_graph_task_id() != -1);
}

const Recording* recording_on(const c10::Device& device) {
  const Recording* recording = recording_under_way();
  return recording != nullptr && recording->device() == device ? recording
                                                               : nullptr;
}

namespace {

[[noreturn]] void refuse(std::string_view call, std::string_view instead) {
  raise(
      {.call = call},
      std::string(
          "this cannot be part of a captured step, since a replay would leave it out. ") +
          std::string(instead));
}

} // namespace

void refuse_in_recording(std::string_view call, std::string_view instead) {
  if (is_recorded_here()) {
    refuse(call, instead);
  }
}

void Recording::add_collective(uint64_t digest) {
  // Whoever recorded the one before has handed over to this thread since.
  collectives_ = mix_digest(collectives_, digest);
}

void count_in_recording(uint64_t digest) {
  if (Recording* recording = recording_under_way(); recording != nullptr) {
    recording->add_collective(digest);
  }
}

void note_in_recording(
    std::string_view call,
    std::string_view instead,
    const std::function<void()>& again) {
  Recording* recording = recording_under_way();
  if (recording == nullptr || !recording->note(again)) {
    refuse(call, instead);
  }
}

void take_part_in_recording(HostPart part) {
  if (recorded_here == nullptr) {
    return;
  }
  auto& parts = recorded_here->parts_;
  const bool is_known =
      std::any_of(parts.begin(), parts.end(), [&](const auto& known) {
        return known.part.owner == part.owner;
      });
  if (!is_known) {
    if (part.objection) {
      if (const std::string objection = part.objection(); !objection.empty()) {
        raise({.call = "CapturedStep"}, objection);
      }
    }
    std::string settings = part.settings();
    parts.push_back({std::move(part), std::move(settings)});
  }
}

void expect_in_recording(const void* object, const std::string& unit) {
  const RecordingScope* scope = under_way();
  if (scope != nullptr && is_recorded_here() && !scope->expects(object)) {
    raise(
        {.call = "CapturedStep", .unit = unit},
        "the step uses this sharded module, which is not in the model of the CapturedStep, and a replay would go on with what it gathered now. Pass a module that holds both.");
  }
}

RecordingScope::RecordingScope(
    Recording& recording,
    std::unordered_set<const void*> expected)
    : recording_(recording), expected_(std::move(expected)) {
  RecordingScope* nobody = nullptr;
  if (!under_way().compare_exchange_strong(nobody, this)) {
    raise(
        {.call = "CapturedStep"},
        "another step of this process is being captured. Capture one after the other.");
  }
  recorded_here = this;
}

RecordingScope::~RecordingScope() {
  recorded_here = nullptr;
  under_way() = nullptr;
}

} // namespace tessera::libtorch
