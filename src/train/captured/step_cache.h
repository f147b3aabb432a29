// The graphs of a captured step, by kind of step.
#pragma once

#include <tessera/train/captured_step.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "train/captured/step_kind.h"
#include "train/captured/step_recording.h"

namespace tessera::train {

/// What is known of one kind of step.
struct KnownKind {
  /// With different settings of their host parts, see libtorch::HostPart.
  std::vector<std::unique_ptr<RecordedStep>> recorded;
  int64_t calls = 0; // of this kind before the present one
  int64_t last_call = 0;
  int attempts = 0; // that failed
  int64_t next_attempt = 0; // not before this call
  std::string reason; // why the last one failed

  /// The recorded step for the settings of now, or null.
  RecordedStep* current() const;
};

/// Keeps a bounded number of kinds and of graphs, and forgets those that have
/// not been used for the longest time.
class StepCache {
 public:
  /// The number of graphs is that of the options.
  explicit StepCache(const CapturedStepOptions& options);

  /// What is known of the kind, in the call of that number: stays valid until
  /// the next one. Graphs that can no longer be replayed are dropped: all if
  /// the `places` of tensors or the device's `epoch` are not those of the call
  /// before, see places_of() and GraphDevice. With `warns`, warns of calls that
  /// are all of new kinds.
  KnownKind& find(
      const StepKind& kind,
      int64_t call,
      uint64_t places,
      uint64_t epoch,
      bool warns);
  /// Keeps a step of this kind in place of `old`, which may be null.
  RecordedStep& keep(
      KnownKind& kind,
      std::unique_ptr<RecordedStep> recorded,
      const RecordedStep* old);
  size_t num_graphs() const;

 private:
  void forget_oldest_kind();
  void forget_oldest_graph();
  void note_new_kind(const StepKind& kind);
  void note_capture();

  const int64_t max_graphs_;
  std::map<std::string, KnownKind> kinds_; // by StepKind::bytes
  uint64_t places_ = 0;
  uint64_t epoch_ = 0;

  // For warnings.
  StepKind last_new_; // of the call before, if that was of a new kind
  int64_t num_new_ = 0; // kinds in a row
  bool has_warned_ = false; // of new kinds
  int64_t num_captures_ = 0;
};

} // namespace tessera::train
