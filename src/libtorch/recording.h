// Whether a step is being recorded, to be done again by a device alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace tessera::libtorch {

/// A recording that is under way. Operators of the step are recorded by the
/// device and not run, so their results cannot be read.
class Recording {
 public:
  virtual ~Recording() = default;
  virtual c10::Device device() const = 0;
  /// How far the device's default generator has come in the recording.
  virtual uint64_t random_position() const = 0;
  /// For a recording of the CPU, whose collectives no stream carries: notes
  /// `call`, which each replay makes. False: it notes none.
  virtual bool note(const std::function<void()>& /*call*/) {
    return false;
  }

  /// A digest of the collectives that are recorded, in order: ranks whose
  /// digests differ could not replay them together.
  uint64_t collectives() const {
    return collectives_;
  }
  void add_collective(uint64_t digest);

 private:
  std::atomic<uint64_t> collectives_{0}; // autograd's threads add to it, too
};

/// What is recorded on this device now; null if nothing is. Autograd's threads
/// ask too.
const Recording* recording_on(const c10::Device& device);
/// Whether this thread runs a step that is recorded, or a backward while one
/// is.
bool is_recorded_here();

/// Throws c10::Error if this thread runs a step that is recorded, or a backward
/// while one is recorded. For calls whose work on the host is needed in every
/// step: a replay leaves it out. `instead` is a sentence that says what to do.
void refuse_in_recording(std::string_view call, std::string_view instead);

/// For a collective where is_recorded_here(); see Recording::collectives().
void count_in_recording(uint64_t digest);

/// For a call on the host between ranks, where is_recorded_here(): each replay
/// makes it by `again`. Throws c10::Error if it cannot.
void note_in_recording(
    std::string_view call,
    std::string_view instead,
    const std::function<void()>& again);

/// An object that a step changes on the host. A replay runs nothing on the
/// host, so the object says how a replay is to change it.
struct HostPart {
  const void* owner = nullptr;
  /// False once the object has been destroyed. Then the recording can no longer
  /// be used, and none of the functions below is called.
  std::function<bool()> lives = [] { return true; };
  /// Asked when the object takes part: why it cannot be recorded as it is now;
  /// empty if it can.
  std::function<std::string()> objection;
  /// Values of the host that the recording takes for granted, as they are now:
  /// where they differ, the step must be recorded anew.
  std::function<std::string()> settings;
  /// The recording failed: the object forgets what was done in it.
  std::function<void()> forget;
  /// The recording is complete: returns a function that, after a replay, puts
  /// the object into the state that it has now. Throws if that is impossible.
  std::function<std::function<void()>()> finish;
};

/// For objects that change in a step, before they do. Counts once per recording
/// and owner; does nothing if this thread records nothing. Throws c10::Error
/// if there is an objection.
void take_part_in_recording(HostPart part);

/// For a unit that is used: throws c10::Error where is_recorded_here() and the
/// recording does not expect the object. `unit` names it.
void expect_in_recording(const void* object, const std::string& unit);

/// As long as it lives, `recording` is under way on this thread, and expects
/// these objects. Throws c10::Error if another recording is under way: devices
/// record one step of a process at a time.
class RecordingScope {
 public:
  RecordingScope(
      Recording& recording,
      std::unordered_set<const void*> expected);
  ~RecordingScope();
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;

  /// In the order in which they took part, with their settings at that time.
  struct Part {
    HostPart part;
    std::string settings;
  };
  const std::vector<Part>& parts() const {
    return parts_;
  }
  Recording& recording() const {
    return recording_;
  }
  bool expects(const void* object) const {
    return expected_.contains(object);
  }

 private:
  friend void take_part_in_recording(HostPart part);

  Recording& recording_;
  const std::unordered_set<const void*> expected_;
  std::vector<Part> parts_; // of this thread
};

} // namespace tessera::libtorch
