// The backward half of the Schedule, from the node that the engine calls on;
// see [Note: schedule].
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <exception>
#include <unordered_set>
#include <utility>

#include "engine/gather_node.h"
#include "engine/idle_buffers.h"
#include "engine/schedule.h"

namespace tessera::engine {
namespace {

/// Units with gradients of earlier backwards without synchronisation that this
/// backward did not use: they belong to this step all the same.
std::vector<Unit*> waiting_units(
    const std::map<int, Unit*>& units,
    const Reductions& reductions) {
  std::unordered_set<const UnitIdentity*> models;
  for (const auto& [unit, used] : reductions.finished()) {
    models.insert(&unit->root());
  }
  std::vector<Unit*> waiting;
  for (const auto& [number, unit] : units) {
    if (unit->gradients().syncs() && unit->gradients().has_waiting() &&
        models.contains(&unit->root())) {
      waiting.push_back(unit);
    }
  }
  return waiting;
}

/// What this rank used of all units, one after the other.
std::vector<bool> used_by_this_rank(
    const std::vector<Reductions::Finished>& finished) {
  std::vector<bool> all;
  for (const auto& [unit, used] : finished) {
    all.insert(all.end(), used.begin(), used.end());
  }
  return all;
}

/// Gradients of parameters that no rank used become undefined again.
void drop_unused(
    const std::vector<Reductions::Finished>& finished,
    const std::vector<bool>& used_by_any) {
  auto next = used_by_any.begin();
  for (const auto& [unit, used] : finished) {
    const auto end = next + static_cast<std::ptrdiff_t>(used.size());
    unit->gradients().drop_unused(std::vector<bool>(next, end));
    next = end;
  }
}

} // namespace

torch::autograd::variable_list GatherNode::apply(
    torch::autograd::variable_list&& gradients) {
  if (at::GradMode::is_enabled()) {
    raise<c10::NotImplementedError>(
        {.call = "backward", .unit = unit_->name()},
        "a backward with create_graph=true through sharded parameters is not supported. Gradients of inputs, torch::autograd::grad(output, {input}, ..., create_graph=true), are.");
  }
  at::NoGradGuard no_grad;
  // Only grad(loss, leaves) and backward(inputs = leaves) want results here.
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  const bool to_autograd = wanted != nullptr && !wanted->empty();
  return unit_->schedule().take_gradients(
      *unit_,
      std::move(gradients),
      to_autograd ? Schedule::Destination::Autograd
                  : Schedule::Destination::Leaves);
}

std::vector<at::Tensor> Schedule::take_gradients(
    Unit& unit,
    std::vector<at::Tensor>&& gradients,
    Destination destination) {
  const RecursiveMutexLock lock(mutex_);
  const size_t count = gradients.size();
  backwards_.enter(shared_from_this());
  unit.params().check_faces("backward");
  reductions_.make_room(unit); // the buffer of the unit before serves this one
  const bool any = unit.gradients().add(std::move(gradients));
  gathers_.free_used(unit);
  if (any && unit.gradients().syncs()) {
    reductions_.start(unit);
  }
  if (destination == Destination::Leaves) {
    unit.gradients().hold_hooks();
    return std::vector<at::Tensor>(count);
  }
  const ScheduleProbe::Wait wait(probe_, ShardEvent::Kind::ReduceWait, unit);
  return unit.gradients().finish_reduction_apart();
}

void Schedule::end_backward() {
  const RecursiveMutexLock lock(mutex_);
  at::NoGradGuard no_grad;
  reductions_.finish();
  for (Unit* unit : waiting_units(units_, reductions_)) {
    reductions_.start(*unit);
    reductions_.finish();
  }
  gathers_.free_at_end();
  for (const auto& [number, unit] : units_) {
    unit->gradients().release_hooks();
  }
  pool_.trim(IdleLimits::kBetweenSteps);
  const auto finished = reductions_.finished();
  reductions_.clear();
  if (const auto used = check_.compare_with_use(used_by_this_rank(finished))) {
    probe_.counts.use_exchanges += check_.is_alone() ? 0 : 1;
    drop_unused(finished, *used);
  }
}

void Schedule::recover() {
  const RecursiveMutexLock lock(mutex_);
  check_.reset();
  reductions_.clear();
  for (const auto& [number, unit] : units_) {
    unit->gradients().drop_reduction();
    unit->gradients().release_hooks();
  }
  gathers_.recover();
}

} // namespace tessera::engine
