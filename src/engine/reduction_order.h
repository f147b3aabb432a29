// Which reductions are under way and which to wait for: decisions alone.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

namespace tessera::engine {

/// [Note: reduction order]
///
/// Units are numbers here, as in GatherOrder, and all ranks decide alike: no
/// decision depends on what has arrived.
///
/// A reduction holds the full gradients of its unit until it is waited for. It
/// runs beside the backward of the units that follow. Before the gradients of
/// another unit are copied to where they travel from, the oldest reductions are
/// waited for, until all gradients that would then travel, but the largest,
/// take at most `overlap_bytes`. With none, that is one reduction in flight,
/// and its buffer serves the next unit.
///
/// In hybrid sharding a reduction goes on over the copies of the model, with
/// this rank's part alone, beside the backward of one unit more. There one
/// reduction is in flight over the shards: those that wait longer would come
/// late to the copies.
///
/// Thread safety: one thread at a time.
class ReductionOrder {
 public:
  /// What is to be done, in order. Both wait for the unit's reduction.
  struct Advance {
    enum class To { Copies, Leaves };
    int unit;
    To to;
  };

  /// Makes room for the gradients of `unit`.
  std::vector<Advance> make_room(
      int unit,
      int64_t bytes,
      int64_t overlap_bytes);
  /// A reduction of the unit's gradients has started.
  void start(int unit, int64_t bytes, bool goes_on_to_copies) {
    over_shards_.push_back({unit, bytes, goes_on_to_copies});
  }
  /// Waits for all.
  std::vector<Advance> finish();
  /// The unit has no reduction under way any longer: nobody waits for it.
  void forget(int unit);

 private:
  struct Reduction {
    int unit;
    int64_t bytes; // of full gradients
    bool goes_on_to_copies;
  };

  bool has(int unit) const;
  bool has_room(int64_t bytes, int64_t overlap_bytes) const;
  void advance_oldest(std::vector<Advance>& steps);
  void finish_over_copies(std::vector<Advance>& steps);

  std::deque<Reduction> over_shards_; // oldest first
  std::deque<Reduction> over_copies_; // the one before these
};

} // namespace tessera::engine
