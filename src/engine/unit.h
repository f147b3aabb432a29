// Parameters that are gathered and freed together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/bundle.h"
#include "engine/unit_gradients.h"
#include "engine/unit_identity.h"
#include "engine/unit_params.h"
#include "engine/unit_start.h"
#include "engine/unit_summon.h"

namespace tessera::engine {

class Schedule;

enum class UnitState {
  /// Faces have no bytes; a touch gathers. Memory: the shard. Next: Gathering
  /// or Summoned.
  Sharded,
  /// A gather is in flight; a touch waits for it. Memory: shard and full
  /// buffer. Next: Full.
  Gathering,
  /// Faces show the full parameters in the compute dtype. Memory: shard and
  /// full buffer. Next: Sharded or Summoned.
  Full,
  /// Faces show the full parameters in full precision, as leaves that may be
  /// written: a private copy, or the shard itself where this rank has it all
  /// and it is not offloaded. Memory: shard, the copy, and the full buffer if
  /// it was Full before. Next: what it was before; Sharded under mixed
  /// precision, whose copy could not see edits.
  Summoned,
};

/// A unit stands between the module's parameters and this rank's shards. The
/// parts of a unit are nouns of their own: who it is (UnitIdentity), its faces
/// and leaves (UnitParams), what travels (Bundle), its gradients
/// (UnitGradients), what it began with (UnitStart), and a summon (UnitSummon).
/// What is left is its state.
///
/// A unit never calls the Schedule that drives it: it tells by what it returns
/// what happened.
///
/// Thread safety: one thread at a time: the program's, or, while that waits in
/// backward(), autograd's. Any thread may call count_write().
class Unit : public UnitIdentity, public std::enable_shared_from_this<Unit> {
 public:
  /// Made by Schedule::add_unit().
  Unit(
      std::string name,
      int number,
      const Groups& groups,
      const UnitOptions& options,
      std::shared_ptr<Schedule> schedule);
  ~Unit();
  /// Shards `params`, which must be leaves of their module and not sharded yet.
  /// Deferred ones are replayed, one at a time; of those that can be read in
  /// parts, this rank's part alone. Once, before anything else.
  void shard(const std::vector<NamedParam>& params, BufferPool& pool);

  /// Who drives this unit: for those who found the unit from a tensor.
  Schedule& schedule() const {
    return *schedule_;
  }
  UnitParams& params() {
    return params_;
  }
  const UnitParams& params() const {
    return params_;
  }
  UnitGradients& gradients() {
    return gradients_;
  }
  /// None in a unit without parameters.
  std::vector<Bundle>& bundles() {
    return bundles_;
  }
  const std::vector<Bundle>& bundles() const {
    return bundles_;
  }
  /// The flat shard of a unit of one dtype; while Summoned the flat full
  /// parameters, without padding if they have one leaf.
  at::Tensor flat_param() const;

  UnitState state() const {
    return state_;
  }
  /// Returns whether it started a gather: not unless the unit was Sharded.
  bool start_gather();
  /// While Gathering. If this throws, the unit is Full of garbage: reshard().
  void finish_gather();
  /// Returns whether it freed the full parameters: not unless the unit was
  /// Full. Not while Gathering.
  bool reshard();
  /// Kept gathered by the user until reshard() or the end of backward.
  void pin() {
    is_pinned_ = true;
  }
  bool is_pinned() const {
    return is_pinned_;
  }

  /// The next gather casts again: the shard may have been written without being
  /// counted, or a recording has only noted the cast, or a replay overwrites
  /// it.
  void forget_casts();

  /// See Schedule. Not while Gathering.
  void summon(const SummonOptions& options);
  SummonEnd end_summon();
  /// What faces show is writable and whole on this rank now.
  bool shows_summoned() const {
    return summoned_ != nullptr && summoned_->is_shown();
  }

  /// True if a shard of the model was written since this unit was gathered
  /// last.
  bool is_stale() const {
    return gathered_at_ != -1 && gathered_at_ != num_writes();
  }
  /// Call it before a shard of this unit is written. The write counts for the
  /// whole model: all of its units become stale. `written` is a view of a
  /// shard; undefined: all shards are written. Throws if the end of a summon
  /// would undo the write. Several threads may call it at once, as the threads
  /// that read a checkpoint do.
  void count_write(const at::Tensor& written = {});

  /// What this rank began with.
  UnitStart& start() {
    return start_;
  }
  const UnitStart& start() const {
    return start_;
  }

 private:
  void make_bundles(const std::vector<NamedParam>& params, BufferPool& pool);
  at::Tensor part_of(const NamedParam& param, const Run& run);

  // Constant after shard(), as far as the unit goes: the parts have states of
  // their own.
  const std::shared_ptr<Schedule> schedule_;
  std::vector<Bundle> bundles_; // one for each dtype
  UnitParams params_;
  UnitGradients gradients_;

  // Changed by the thread that runs the model.
  UnitState state_ = UnitState::Sharded;
  bool is_pinned_ = false;
  int64_t gathered_at_ = -1; // num_writes() then
  std::unique_ptr<UnitSummon> summoned_; // while Summoned

  UnitStart start_;
  std::mutex write_mutex_; // held for what is done before a write
};

} // namespace tessera::engine
