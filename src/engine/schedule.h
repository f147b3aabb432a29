// When units are gathered, reduced and freed.
#pragma once

#include <tessera/comm/group.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/buffer_pool.h"
#include "engine/observer.h"
#include "engine/plain_watch.h"

namespace tessera::engine {

class Unit;

/// What a Schedule did, for tests and reports. Where nothing had to be moved
/// (one rank that computes in the shard's dtype) nothing is counted.
struct ScheduleCounts {
  int64_t gathers = 0;
  int64_t prefetched = 0; // of these, started before they were touched
  int64_t reductions = 0;
  int64_t reshards = 0;
  int64_t summons = 0;
  int64_t use_exchanges = 0; // about parameters that a rank did not use
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
/// a backward, before an optimizer could step, and every kGathersPerCheck
/// gathers for programs that only evaluate.
///
/// In or out of backward: the thread's graph task id. The end of backward: a
/// callback of the engine, queued by the first touch or node of a graph task.
/// If backward throws, the engine drops the callback, and the token that the
/// callback holds recovers. On a GPU the engine drops the callback on a thread
/// of its own, maybe after the program has caught the error and gone on: there
/// the next touch or backward recovers, on the program's thread.
///
/// A parameter that no rank used keeps an undefined gradient; one that any rank
/// used has one on all. Ranks exchange that at the end of a backward, if one of
/// them has a parameter in doubt.
///
/// Units that die stay in recorded orders as gaps, so that ranks go on
/// foreseeing the same gathers.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(const Group& group) : group_(group) {}

  /// The schedule of all units of this group.
  static std::shared_ptr<Schedule> of(const Group& group);

  /// An operator is about to read these units.
  void touch(std::span<Unit* const> units);
  /// Explicit unshard() of the user: stays until reshard() or backward.
  void gather(Unit& unit);
  /// The unit's model is about to be used. The first time, the ranks compare
  /// what they began with, see [Note: equal starts].
  void begin_use(const Unit& unit);

  void enter_backward();
  bool in_backward() const;

  /// The forward of `unit`'s module runs between these two calls. Told by those
  /// who can tell; a plain call of forward() leaves no trace.
  void enter_forward(const Unit& unit);
  void leave_forward(const Unit& unit);
  /// True if such a forward is under way in this unit, above or below it.
  bool in_forward(const Unit& unit) const;

  /// Waits for the reduction in flight, if there is one. It ran beside the
  /// backward of the next unit; more in flight would each hold a full gradient.
  void finish_reductions();

  /// Units report that they are there, and what they do.
  void add(Unit& unit);
  void note_gather(Unit& unit);
  void note_reshard(Unit& unit);
  void note_reduction(Unit& unit);
  void note_summon(Unit& unit);
  void forget(Unit& unit);
  /// A user's hook threw in this backward: at its end all ranks do.
  void note_failure(std::exception_ptr failure) {
    failure_ = failure_ ? failure_ : std::move(failure);
  }

  /// Tells the observer how long it lived; nothing where there is none.
  class Watch {
   public:
    Watch(const Schedule& schedule, ShardEvent::Kind kind, const Unit& unit);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    const Schedule& schedule_;
    const ShardEvent::Kind kind_;
    const Unit& unit_;
    std::chrono::steady_clock::time_point start_;
  };
  Watch watch(ShardEvent::Kind kind, const Unit& unit) const {
    return Watch(*this, kind, unit);
  }
  /// Replaces the observer; an empty function removes it.
  void set_observer(Observer observer) {
    observer_ = std::move(observer);
  }

  /// Drops everything in flight and reshards all units: after an exception.
  void recover();

  const ScheduleCounts& counts() const {
    return counts_;
  }
  void reset_counts() {
    counts_ = {};
  }
  /// Parameters beside the units, see [Note: plain parameters].
  PlainWatch& plain() {
    return plain_;
  }
  BufferPool& pool() {
    return pool_;
  }
  const BufferPool& pool() const {
    return pool_;
  }

 private:
  /// A backward under way. Held by the engine's callback alone.
  struct OpenBackward {
    std::shared_ptr<Schedule> schedule;
    const int task;
    const std::thread::id thread; // that ran forward
    bool ended = false;
    ~OpenBackward();
  };

  /// Recovers if a backward threw and nobody has recovered since.
  void recover_from_dropped();
  void make_room(std::span<Unit* const> units);
  void ensure_full(Unit& unit);
  void begin_iteration(Unit& unit);
  void gather_ahead(Unit& unit);
  void tell(const ShardEvent& event) const;
  void end_backward();
  void reduce_what_waits();
  void mix_hash(char kind, const Unit& unit);
  bool compare_hash(bool flag, int64_t plain = 0);
  void compare_order_and_use();
  [[noreturn]] void fail_after_hook(int rank);

  const Group group_;
  std::mutex mutex_; // refuses a second thread
  std::vector<Unit*> units_; // all, by number
  std::vector<Unit*> full_; // Gathering or Full, oldest first
  std::deque<Unit*> reducing_; // oldest first
  /// Units reduced in this backward, in order, with what finish_reduction()
  /// said.
  std::vector<std::pair<Unit*, std::vector<bool>>> reduced_;
  std::vector<std::pair<int, std::weak_ptr<OpenBackward>>>
      open_; // by graph task
  std::thread::id thread_; // of the last touch outside of backward
  std::vector<const Unit*> in_forward_; // innermost last
  Unit* last_touched_ = nullptr;

  // The gather order that is expected of this iteration, what it is, and those
  // of earlier ones by their first unit.
  std::vector<Unit*> order_;
  std::vector<Unit*> next_order_;
  std::unordered_map<const Unit*, std::vector<Unit*>> orders_;
  size_t position_ = 0;
  bool predicts_ = false;
  bool iteration_ended_ = true;

  uint64_t hash_ = 0;
  int unchecked_gathers_ = 0;
  bool starts_ahead_ = false;
  Observer observer_;
  ScheduleCounts counts_;
  BufferPool pool_;
  PlainWatch plain_;
  std::exception_ptr failure_; // of a user's hook, in this backward
};

} // namespace tessera::engine
