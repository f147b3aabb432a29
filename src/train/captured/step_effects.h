// What a step changes beside the memory of the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/unit.h"
#include "train/captured/step_parts.h"

namespace tessera::train {

/// A replay runs nothing on the host. These are the changes that the step made
/// to host objects when it was recorded, to be repeated around each replay.
struct StepEffects {
  /// A unit for each sharded model whose shards the step writes.
  std::vector<std::shared_ptr<engine::Unit>> written;
  /// Tensors whose version counters the step moved.
  std::vector<at::Tensor> changed;
  /// Gradients that leaves get, by leaf; undefined: they lose theirs.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;

  /// Call both around a replay.
  void before_replay() const;
  void after_replay() const;
};

/// Watches a step while it is recorded.
class EffectsWatch {
 public:
  explicit EffectsWatch(const StepParts& parts);

  /// The gradients that are there and that each replay would find in other
  /// memory: all but those in buckets.
  std::vector<at::Tensor> old_gradients() const;

  /// The step is over. Throws c10::Error if it did what a replay cannot do
  /// again: added to gradients that were there, left some for later, or put
  /// another tensor in the place of a parameter or buffer; or if there was an
  /// operator that used old_gradients().
  StepEffects finish(const std::string& user_of_old_gradients) const;
  /// The step failed: gradients and units are as they were before it.
  void undo() const;

 private:
  void check_gradients(const std::string& user_of_old_gradients) const;
  void check_waiting() const;
  bool stays(const at::Tensor& gradient) const;

  const StepParts& parts_;
  const std::vector<ddp::Reducer*> reducers_;
  std::map<const engine::UnitIdentity*, int64_t> writes_; // by root
  std::vector<std::pair<at::Tensor, int64_t>> versions_;
  std::vector<std::pair<at::Tensor, int64_t>> gradients_; // by leaf
};

/// What to say of StepParts::replaced(); empty for an empty one.
std::string objection_to_replaced(const std::string& replaced);

} // namespace tessera::train
