// Which units to gather ahead and which units to free: decisions alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::engine {

/// Memory for overlap where the user chose none: what units gathered ahead may
/// take beside the next one, and reductions beside the newest one. None on the
/// CPU, where memory and caches are small; on a device a fraction of a percent.
constexpr int64_t default_overlap_bytes(bool on_cpu) {
  return on_cpu ? 0 : int64_t{192} << 20;
}

/// Else there is nothing to wait for, only memory to hold.
constexpr bool is_worth_gathering_ahead(int64_t shards, bool is_offloaded) {
  return shards > 1 || is_offloaded;
}

/// [Note: gather order]
///
/// Units are numbers here: the Schedule carries out what this class decides,
/// and the planner counts what the Schedule would do. All ranks decide alike,
/// since every decision follows from the order in which the program touches
/// units, and from sizes.
///
/// Foresight. The order of gathers is recorded from one end of backward to the
/// next. In the next iteration the gathers that followed the current one are
/// foreseen, and started ahead: as soon as the current gather is finished. The
/// last unit of forward is often the first of backward, and still Full then:
/// gathers are started where backward begins. A unit that stays from one
/// iteration to the next is recorded where it is used first, as if it was
/// gathered there: so the iterations of an accumulation, of which only the
/// first gathers the root, are alike. Iterations that begin with the
/// same unit are taken for the same: a program may train several models in
/// turns. A gather out of order is right all the same: nothing is foreseen
/// until the next iteration.
///
/// How far. The unit needed next is gathered ahead, whatever its size. More
/// are, in the order in which they are needed, as long as all of them but the
/// largest take at most NeededUnit::overlap_bytes. The root is not counted: it
/// stays once it is used.
///
/// Across iterations. Where gradients wait for another backward, no optimizer
/// writes before it, so the next iteration is foreseen, too, as one like this:
/// its first units are gathered while backward computes, or stay if they are
/// there. They take the place of the unit in use and of those gathered ahead,
/// and no more.
///
/// Units that die stay in recorded orders as gaps, so that ranks go on
/// foreseeing the same gathers.
///
/// Room. A touch frees the units that it does not need, see HeldUnit. In
/// backward kKeptInBackward units beside these stay, the ones gathered last.
///
/// Thread safety: one thread at a time.
class GatherOrder {
 public:
  /// What is known of orders, see Foresight above.
  struct Orders {
    std::unordered_map<int, std::vector<int>> known; // by the first unit
    std::vector<int> expected; // of this iteration
    std::vector<int> recorded; // in this iteration so far
    size_t position = 0; // in expected
    bool foresees = false; // this iteration went as expected so far
    bool is_iteration_ended = true;
  };

  /// Units beside the touched one that stay in backward.
  static constexpr int kKeptInBackward = 1;
  /// Gathers of one iteration that are recorded: an evaluation loop never ends.
  static constexpr size_t kMaxRecord = 1 << 16;

  /// What decides whether a held unit may be freed for a touch.
  struct HeldUnit {
    bool is_touched = false; // by the operator that needs room
    bool is_above = false; // a root, or contains a touched unit
    bool is_gathering = false; // it was foreseen, and will be needed soon
    bool is_kept = false; // until backward, or by the user's wish
  };

  /// What decides whether a unit that is needed soon is gathered ahead.
  struct NeededUnit {
    bool is_root = false; // stays once it is used
    bool is_full = false;
    bool is_sharded = false; // and no gather is in flight
    bool may_be_gathered = false; // see is_worth_gathering_ahead()
    bool accumulates = false; // its gradients wait for another backward
    int64_t bytes = 0; // of its full parameters
    int64_t overlap_bytes = 0; // see How far above
  };
  using DescribeNeeded = std::function<NeededUnit(int unit)>;

  /// The gather of `unit` has started: it holds memory until it is freed.
  void hold(int unit) {
    held_.push_back(unit);
  }
  void free(int unit);
  /// Units that hold memory, oldest gather first.
  const std::vector<int>& held() const {
    return held_;
  }
  /// The units to free before a touch, newest first. `describe(unit)` returns
  /// the HeldUnit of a unit that is held.
  template <class Describe>
  std::vector<int> to_free(bool in_backward, const Describe& describe) const {
    std::vector<int> result;
    int kept = 0;
    for (auto unit = held_.rbegin(); unit != held_.rend(); ++unit) {
      const HeldUnit held = describe(*unit);
      const bool is_needed = held.is_touched || held.is_above ||
          held.is_gathering || held.is_kept || is_wanted(*unit);
      if (!is_needed && !(in_backward && kept++ < kKeptInBackward)) {
        result.push_back(*unit);
      }
    }
    return result;
  }

  /// Records a gather that a touch needed.
  void record(int unit);
  /// A touch needed `unit`, which is Full. Records that and returns true if it
  /// is the first since the last iteration.
  bool record_stayed(int unit);
  /// The units whose gathers are to be started now, in this order, while
  /// `in_use` is computed with.
  std::vector<int> to_gather(
      bool in_backward,
      int in_use,
      const DescribeNeeded& describe);
  /// The last to_gather() foresaw a use of the unit soon: what is full stays.
  bool is_wanted(int unit) const;
  /// The units to free when a backward has ended: not those that the next
  /// iteration will need first, nor the root, if gradients wait for it.
  std::vector<int> to_free_at_end(const DescribeNeeded& describe);
  /// The next gather begins an iteration.
  void end_iteration() {
    orders_.is_iteration_ended = true;
    stayed_ = held_;
  }
  /// A part of a program may have orders of its own, which others do not
  /// disturb.
  void exchange_orders(Orders& orders) {
    std::swap(orders_, orders);
  }

  /// `unit` died.
  void forget(int unit);
  /// After an exception: no order is known, nothing is foreseen. What is held
  /// stays held until it is freed.
  void forget_orders();

 private:
  void begin_iteration(int first);
  std::vector<int> look_ahead(
      bool across_iterations,
      std::optional<int> in_use,
      const DescribeNeeded& describe) const;

  std::vector<int> held_; // oldest gather first
  std::vector<int> stayed_; // since the last iteration, and not used yet
  std::vector<int> wanted_; // soon, in the order in which they are needed

  Orders orders_;
};

} // namespace tessera::engine
