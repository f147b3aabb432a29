// The driver of a step: when units are gathered, reduced and freed.
#pragma once

#include <tessera/comm/group.h>

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/buffer_pool.h"
#include "engine/gathers.h"
#include "engine/order_check.h"
#include "engine/probe.h"
#include "engine/reductions.h"
#include "engine/unit.h"
#include "libtorch/backward_hooks.h"

namespace tessera::engine {

/// Drives the units of one group.
///
/// [Note: schedule]
///
/// Calls go one way. The Schedule calls units, which tell by what they return
/// what happened and never call back. Gathers fills and frees them, as
/// GatherOrder decides; Reductions averages their gradients, as ReductionOrder
/// decides. Both note in OrderCheck what all ranks must do alike, and count in
/// ScheduleProbe.
///
/// Forward (schedule.cpp): a touch frees the units that it does not need, makes
/// the touched ones Full, and starts the gathers that followed last time. The
/// first touch of a unit also compares what the ranks began with (start.h), and
/// gives each rank random numbers of its own if the program asked for that
/// (seed.h).
///
/// Backward (schedule_backward.cpp): a touch does the same, and the first one
/// starts the foreseen gathers even if what it touches is Full. When the
/// gradients of a unit are there, its node hands them over: room is made for
/// them, by finishing the reduction of the unit before, the gradients are
/// copied to where they travel from, this unit is freed (unless it is the
/// root), and its reduction starts. It runs beside the backward of the next
/// unit. In hybrid sharding it goes on over the copies of the model, with this
/// rank's part alone, beside the backward of one unit more. At the end of
/// backward the last reductions are finished, everything is freed (but what the
/// next forward begins with, where gradients go on accumulating), and the ranks
/// compare what they did.
///
/// Autograd's graph task id tells whether this thread is in a backward.
/// OpenBackwards (libtorch/backward_hooks.h) calls end_backward() when autograd
/// is through, and recover() when a backward threw.
///
/// A unit that dies is forgotten at once: the Schedule made the pointer that
/// owns it. A unit may die later on one rank than on another, because a graph
/// that one rank keeps also keeps its units. So what all ranks must count alike
/// is begun anew whenever a unit is added.
///
/// Thread safety: a model belongs to one thread, or, while that thread waits in
/// backward(), to autograd's. touch() throws if two touches overlap; a second
/// thread that comes between two touches is not noticed. Units may die on any
/// thread: autograd's own threads drop their last node after backward() has
/// returned.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  /// The schedule of all units of this group.
  static std::shared_ptr<Schedule> of(const Group& group);
  explicit Schedule(const Group& group);

  /// Shards `params` and drives the new unit as long as it lives, see Unit.
  /// Numbers grow from one unit of the group to the next.
  std::shared_ptr<Unit> add_unit(
      std::string name,
      int number,
      const std::vector<NamedParam>& params,
      const Groups& groups,
      const UnitOptions& options);

  /// An operator is about to read these units.
  void touch(std::span<Unit* const> units);
  /// Explicit unshard() of the user: stays until reshard() or backward.
  void gather(Unit& unit);
  /// Frees what was gathered, unless the unit is summoned.
  void reshard(Unit& unit);

  /// Where averaged gradients go: to the leaves, or back to autograd, which
  /// wants them for torch::autograd::grad(loss, leaves).
  enum class Destination { Leaves, Autograd };
  /// The gradients of all faces of a unit, by position, are there. Called by
  /// the unit's node, in a backward; returns what autograd gets for the
  /// leaves, by position.
  std::vector<at::Tensor> take_gradients(
      Unit& unit,
      std::vector<at::Tensor>&& gradients,
      Destination destination);

  /// Reduces the gradients that wait in those of `units` that are of this
  /// schedule, as the end of a backward does. Collective; not in a backward.
  void reduce_waiting(const std::vector<std::shared_ptr<Unit>>& units);

  /// See UnitState::Summoned. Collective over the shard group; not while
  /// Summoned. Ranks that are not shown anything take part.
  void summon(Unit& unit, const SummonOptions& options);
  /// Writes back, if asked, and shows what was shown before. Collective.
  void end_summon(Unit& unit);

  /// Drops everything in flight and reshards all units: after an exception.
  void recover();

  /// From now on these orders are foreseen and recorded; see GatherOrder.
  void exchange_orders(GatherOrder::Orders& orders);
  /// Gradients of earlier backwards wait in some unit for a later one.
  bool holds_gradients();

  /// What the ranks compare: for the thread that runs the model.
  OrderCheck& check() {
    return check_;
  }
  BufferPool& pool() {
    return pool_;
  }
  ScheduleProbe& probe_for_tests() {
    return probe_;
  }

 private:
  // Held by the thread that runs the model, and by one that drops a unit.
  // Recursive, since a unit may die inside any call.
  RecursiveMutex mutex_;

  void compare_if_due() TESSERA_REQUIRES(mutex_);
  void end_backward();
  void forget(Unit* gone);

  std::mutex touching_; // held by touch(), to notice a second thread

  // These belong to the thread that runs the model, which is given them.
  OrderCheck check_;
  ScheduleProbe probe_;
  BufferPool pool_;

  // By number, all that live.
  std::map<int, Unit*> units_ TESSERA_GUARDED_BY(mutex_);
  Gathers gathers_ TESSERA_GUARDED_BY(mutex_){units_, check_, probe_};
  Reductions reductions_ TESSERA_GUARDED_BY(mutex_){units_, check_, probe_};
  libtorch::OpenBackwards backwards_ TESSERA_GUARDED_BY(mutex_);
};

} // namespace tessera::engine
