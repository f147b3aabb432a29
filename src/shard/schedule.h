// When units are gathered, reduced and freed.
#pragma once

#include <tessera/comm/group.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "shard/buffer_pool.h"

namespace tessera::shard {

class Unit;

/// What a Schedule did, for tests and reports.
struct ScheduleCounts {
  int64_t gathers = 0;
  int64_t prefetched = 0; // of these, started before they were touched
  int64_t reductions = 0;
  int64_t reshards = 0;
  int64_t peak_full_bytes = 0; // of all units at once
};

/// The units of one group and the order in which the program touches them.
///
/// [Note: schedule]
///
/// A touch makes the touched units Full. In forward it first makes room: other
/// units that are Full are resharded, except roots, whose parameters stay until
/// backward ends, and ancestors of the touched ones. In backward a unit is
/// resharded by its node, when its gradients are there.
///
/// The order of gathers is recorded from one end of backward to the next. In
/// the next iteration the gather after the current one is started ahead. A
/// touch out of that order is right all the same: predictions stop until the
/// next iteration. All ranks start the same collectives in the same order,
/// since the order comes from the program alone.
///
/// That ranks really do is checked: a hash of all (kind, unit) is compared once
/// a backward, before an optimizer could step.
///
/// In or out of backward: the thread's graph task id. The end of backward: a
/// callback of the engine, queued by the first touch or node of a graph task.
/// If backward throws, the engine drops the callback; a token that it holds
/// then recovers.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(const Group& group) : group_(group) {}

  /// The schedule of all units of this group.
  static std::shared_ptr<Schedule> of(const Group& group);

  /// Counts the group's units: the same on all its ranks, as the calls are.
  int next_unit_number() {
    return num_units_++;
  }

  /// An operator is about to read these units.
  void touch(std::span<Unit* const> units);
  /// Explicit unshard() of the user: stays until reshard() or backward.
  void gather(Unit& unit);

  void enter_backward();
  bool in_backward() const;

  /// Units report what they do.
  void note_gather(Unit& unit);
  void note_reshard(Unit& unit);
  void note_reduction(Unit& unit);
  void forget(Unit& unit);

  /// Drops everything in flight and reshards all units: after an exception.
  void recover();

  void set_prefetch(bool on) {
    prefetch_ = on;
  }
  const ScheduleCounts& counts() const {
    return counts_;
  }
  void reset_counts() {
    counts_ = {};
  }
  BufferPool& pool() {
    return pool_;
  }

 private:
  void make_room(std::span<Unit* const> units);
  void ensure_full(Unit& unit);
  void begin_iteration();
  void predict(Unit& unit);
  void end_backward();
  void finish_reductions(size_t keep);
  void mix_hash(char kind, const Unit& unit);
  void compare_hash();

  const Group group_;
  std::mutex mutex_; // refuses a second thread
  std::vector<Unit*> full_; // Gathering or Full, oldest first
  std::deque<Unit*> reducing_; // oldest first
  std::vector<int> open_tasks_; // graph tasks of a backward under way
  Unit* last_touched_ = nullptr;

  // The gather order of the iteration before, and of this one.
  std::vector<Unit*> order_;
  std::vector<Unit*> next_order_;
  size_t position_ = 0;
  bool predicts_ = false;
  bool iteration_ended_ = true;

  int num_units_ = 0;
  bool prefetch_ = true;
  uint64_t hash_ = 0;
  ScheduleCounts counts_;
  BufferPool pool_;
};

} // namespace tessera::shard
