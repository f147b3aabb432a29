// Which unit to gather ahead and which units to free: decisions alone.
#pragma once

#include <cstddef>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::engine {

/// [Note: gather order]
///
/// Units are numbers here: the Schedule carries out what this class decides,
/// and the planner counts what the Schedule would do. All ranks decide alike,
/// since every decision follows from the order in which the program touches
/// units.
///
/// Foresight. The order of gathers is recorded from one end of backward to the
/// next. In the next iteration the gather that followed the current one is
/// foreseen, and started ahead: as soon as the current gather is finished. The
/// last unit of forward is often the first of backward, and still Full then:
/// its gather is started where backward begins. A unit that stays from one
/// iteration to the next is recorded where it is used first, as if it was
/// gathered there: so the iterations of an accumulation, of which only the
/// first gathers the root, are alike. Iterations that begin with the
/// same unit are taken for the same: a program may train several models in
/// turns. A gather out of order is right all the same: nothing is foreseen
/// until the next iteration.
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
      const bool is_needed =
          held.is_touched || held.is_above || held.is_gathering || held.is_kept;
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
  /// The unit whose gather is to be started now: the one that followed last
  /// time.
  std::optional<int> foreseen() const;
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
  static constexpr int kGap = -1; // a unit that died

  void begin_iteration(int first);

  std::vector<int> held_; // oldest gather first
  std::vector<int> stayed_; // since the last iteration, and not used yet

  Orders orders_;
};

} // namespace tessera::engine
