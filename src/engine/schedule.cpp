#include "engine/schedule.h"

#include <tessera/engine/seed.h>
#include <tessera/error.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "engine/start.h"
#include "engine/unit.h"

namespace tessera::engine {
namespace {

/// Units beside the touched one that stay Full in backward.
constexpr int kKeptInBackward = 1;
constexpr int kGathersPerCheck = 64;
/// Buffers of one size that a forward needs: the touched unit's and the next.
constexpr size_t kIdleBetweenSteps = 2;

bool is_among(std::span<Unit* const> units, const Unit* unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

} // namespace

std::shared_ptr<Schedule> Schedule::of(const Group& group) {
  // Never destroyed: units may die in static destructors.
  static auto& schedules = *new std::map<const void*, std::weak_ptr<Schedule>>;
  static auto& mutex = *new std::mutex;
  const std::scoped_lock lock(mutex);
  auto& entry = schedules[&group.impl()];
  auto schedule = entry.lock();
  if (!schedule) {
    schedule = std::make_shared<Schedule>(group);
    entry = schedule;
  }
  return schedule;
}

bool Schedule::in_backward() const {
  return torch::autograd::get_current_graph_task_id() >= 0;
}

void Schedule::touch(std::span<Unit* const> units) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    raise(
        {.call = "forward", .unit = units.front()->name()},
        "a second thread uses this sharded model at the same time. A model belongs to one thread; give each its own, or take turns.");
  }
  if (!in_backward()) {
    thread_ = std::this_thread::get_id();
    recover_from_dropped();
  }
  const bool only_last = units.size() == 1 && units.front() == last_touched_ &&
      units.front()->state() == UnitState::Full && !units.front()->is_stale();
  if (only_last && (!in_backward() || !open_.empty())) {
    return;
  }
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  if (in_backward()) {
    enter_backward();
  }
  for (Unit* unit : units) {
    if (unit->state() == UnitState::Summoned) {
      raise(
          {.call = in_backward() ? "backward" : "forward",
           .unit = unit->name()},
          unit->shows_summoned()
              ? "this uses parameters as they were before summon_full_params. Close the guard first."
              : "this rank kept its shard inside summon_full_params(rank0_only), and the others will not come to gather it. Use the parameters on rank 0 only, or close the guard first.");
    }
    if (in_backward() && unit->is_stale()) {
      raise(
          {.call = "backward", .unit = unit->name()},
          "the shard was changed (by an optimizer step?) between this graph's forward and its backward. Run forward again.");
    }
  }
  for (const Unit* unit : units) {
    begin_use(*unit);
  }
  seed_per_rank();
  make_room(units);
  for (Unit* unit : units) {
    ensure_full(*unit);
  }
  last_touched_ = units.back();
}

void Schedule::gather(Unit& unit) {
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  unit.check_faces("unshard"); // also where it is Full already
  begin_use(unit);
  ensure_full(unit);
  unit.pin();
}

void Schedule::begin_use(const Unit& unit) {
  if (!unit.start()) {
    return;
  }
  std::vector<Unit*> fresh; // of the same model, in an order that ranks share
  for (Unit* other : units_) {
    if (other->start() && &other->root() == &unit.root()) {
      fresh.push_back(other);
    }
  }
  compare_starts(fresh, group_);
  for (Unit* other : fresh) {
    other->forget_start();
  }
}

void Schedule::make_room(std::span<Unit* const> units) {
  const bool backward = in_backward();
  int kept = 0;
  // Newest first: in backward the newest stay.
  for (Unit* unit : std::vector<Unit*>(full_.rbegin(), full_.rend())) {
    const bool needed = unit->is_root() || unit->is_pinned() ||
        is_among(units, unit) || unit->state() == UnitState::Gathering ||
        !unit->options().reshard_after_forward ||
        std::any_of(units.begin(), units.end(), [&](const Unit* touched) {
                          return unit->contains(*touched);
                        });
    if (needed || (backward && kept++ < kKeptInBackward)) {
      continue;
    }
    unit->reshard();
  }
}

void Schedule::ensure_full(Unit& unit) {
  if (!in_backward() && unit.state() != UnitState::Sharded) {
    unit.follow_requires_grad(); // a gather does so by itself
  }
  if (unit.state() == UnitState::Full && !unit.is_stale()) {
    return;
  }
  if (unit.is_stale()) {
    unit.reshard();
  }
  if (unit.state() == UnitState::Gathering && !unit.shows_shard()) {
    ++counts_.prefetched;
  }
  unit.start_gather();
  unit.finish_gather();
  gather_ahead(unit);
  if (!in_backward() && unchecked_gathers_ >= kGathersPerCheck) {
    compare_hash(false);
  }
}

/// Iterations that begin with the same unit are taken for the same: a program
/// may train several models in turns.
void Schedule::begin_iteration(Unit& unit) {
  if (!next_order_.empty() && next_order_.front() != nullptr) {
    Unit* first = next_order_.front();
    orders_[first] = std::move(next_order_);
  }
  next_order_.clear();
  const auto known = orders_.find(&unit);
  order_ = known == orders_.end() ? std::vector<Unit*>() : known->second;
  predicts_ = !order_.empty();
  position_ = 0;
  iteration_ended_ = false;
}

/// Records this gather and starts the one that followed it last time. Only now
/// that this one is finished: what it needed on the way is free again.
void Schedule::gather_ahead(Unit& unit) {
  if (iteration_ended_) {
    begin_iteration(unit);
  }
  constexpr size_t kMaxRecord = 1 << 16; // evaluation loops never end
  if (next_order_.size() < kMaxRecord) {
    next_order_.push_back(&unit);
  }
  predicts_ =
      predicts_ && position_ < order_.size() && order_[position_] == &unit;
  ++position_;
  Unit* next =
      predicts_ && position_ < order_.size() ? order_[position_] : nullptr;
  const bool is_worth_it = next != nullptr && // not one that is gone
      (next->groups().shard.size() > 1 || next->options().offload);
  if (is_worth_it) { // else there is nothing to wait for, only memory to hold
    struct Ahead {
      bool& flag;
      explicit Ahead(bool& on) : flag(on) {
        flag = true;
      }
      ~Ahead() {
        flag = false;
      }
    } const ahead(starts_ahead_);
    next->start_gather();
  }
}

void Schedule::enter_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  const auto is_this = [task](const auto& open) { return open.first == task; };
  if (task < 0 || std::ranges::any_of(open_, is_this)) {
    return;
  }
  recover_from_dropped();
  const auto backward =
      std::make_shared<OpenBackward>(shared_from_this(), task, thread_);
  open_.emplace_back(task, backward);
  torch::autograd::Engine::get_default_engine().queue_callback([this,
                                                                backward,
                                                                is_this] {
    if (open_.size() == 1) {
      end_backward(); // if it throws, this backward is still to recover from
    }
    std::erase_if(open_, is_this);
    backward->ended = true;
  });
}

Schedule::OpenBackward::~OpenBackward() {
  if (!ended && std::this_thread::get_id() == thread) {
    std::erase_if(
        schedule->open_, [&](const auto& open) { return open.first == task; });
    schedule->recover();
  }
}

void Schedule::recover_from_dropped() {
  // Outside of a backward none is under way, whatever the engine still holds.
  const bool outside = !in_backward();
  const auto num_dropped = std::erase_if(open_, [&](const auto& open) {
    return outside || open.second.expired();
  });
  if (num_dropped > 0) {
    recover();
  }
}

void Schedule::end_backward() {
  at::NoGradGuard no_grad;
  finish_reductions();
  reduce_what_waits();
  for (Unit* unit : std::vector<Unit*>(full_)) {
    unit->reshard();
  }
  for (Unit* unit : units_) {
    unit->release_hooks();
  }
  pool_.trim(kIdleBetweenSteps);
  last_touched_ = nullptr;
  iteration_ended_ = true;
  compare_order_and_use();
}

/// Gradients of earlier backwards without synchronisation whose units this one
/// did not use: they belong to this step all the same.
void Schedule::reduce_what_waits() {
  std::unordered_set<const Unit*> models;
  for (const auto& [unit, used] : reduced_) {
    models.insert(&unit->root());
  }
  for (Unit* unit : std::vector<Unit*>(units_)) {
    if (unit->syncs_gradients() && unit->has_waiting_gradients() &&
        models.contains(&unit->root())) {
      unit->start_reduction();
      finish_reductions();
    }
  }
}

/// See [Note: schedule].
void Schedule::compare_order_and_use() {
  const auto reduced = std::exchange(reduced_, {});
  int64_t count = 0;
  bool in_doubt = false;
  for (const auto& [unit, used] : reduced) {
    count += static_cast<int64_t>(used.size());
    in_doubt =
        in_doubt || std::find(used.begin(), used.end(), false) != used.end();
  }
  at::Tensor flags = at::zeros({count + 1}, at::kByte);
  auto* bytes = flags.mutable_data_ptr<uint8_t>();
  for (const auto& [unit, used] : reduced) {
    for (const bool one : used) {
      *bytes++ = one ? 1 : 0;
    }
  }
  in_doubt = compare_hash(in_doubt, plain_.digest());
  if (!in_doubt) {
    return;
  }
  if (group_.size() > 1) {
    ++counts_.use_exchanges;
    group_.all_reduce(flags, ReduceOp::Max, "unused parameters");
  }
  bytes = flags.mutable_data_ptr<uint8_t>();
  for (const auto& [unit, used] : reduced) {
    std::vector<bool> unused;
    for (size_t position = 0; position < used.size(); ++position) {
      unused.push_back(*bytes++ == 0);
    }
    unit->drop_gradients(unused);
  }
}

void Schedule::tell(const ShardEvent& event) const {
  if (observer_) {
    observer_(event);
  }
}

Schedule::Watch::Watch(
    const Schedule& schedule,
    ShardEvent::Kind kind,
    const Unit& unit)
    : schedule_(schedule), kind_(kind), unit_(unit) {
  if (schedule_.observer_) {
    start_ = std::chrono::steady_clock::now();
  }
}

Schedule::Watch::~Watch() {
  if (schedule_.observer_) {
    schedule_.tell(
        {.kind = kind_,
         .unit = unit_,
         .in_backward = schedule_.in_backward(),
         .waited = std::chrono::steady_clock::now() - start_});
  }
}

void Schedule::note_gather(Unit& unit) {
  full_.push_back(&unit);
  mix_hash('g', unit);
  ++unchecked_gathers_;
  const auto bytes = static_cast<int64_t>(unit.full_bytes());
  if (bytes == 0) {
    return; // it shows the shard
  }
  ++counts_.gathers;
  tell(
      {.kind = ShardEvent::Kind::Gather,
       .unit = unit,
       .bytes = bytes,
       .ahead = starts_ahead_,
       .in_backward = in_backward()});
}

void Schedule::note_reshard(Unit& unit) {
  std::erase(full_, &unit);
  if (last_touched_ == &unit) {
    last_touched_ = nullptr;
  }
  if (!unit.shows_shard()) {
    ++counts_.reshards;
    tell(
        {.kind = ShardEvent::Kind::Reshard,
         .unit = unit,
         .in_backward = in_backward()});
  }
}

void Schedule::note_reduction(Unit& unit) {
  mix_hash('r', unit);
  reducing_.push_back(&unit);
  if (unit.groups().all.size() > 1) {
    ++counts_.reductions;
    tell(
        {.kind = ShardEvent::Kind::Reduce,
         .unit = unit,
         .bytes = static_cast<int64_t>(unit.gradient_bytes()),
         .in_backward = in_backward()});
  }
}

void Schedule::note_summon(Unit& unit) {
  mix_hash('s', unit);
  ++counts_.summons;
  if (last_touched_ == &unit) {
    last_touched_ = nullptr;
  }
  tell({.kind = ShardEvent::Kind::Summon, .unit = unit});
}

void Schedule::enter_forward(const Unit& unit) {
  in_forward_.push_back(&unit);
}

void Schedule::leave_forward(const Unit& unit) {
  const auto last = std::find(in_forward_.rbegin(), in_forward_.rend(), &unit);
  if (last != in_forward_.rend()) {
    in_forward_.erase(std::next(last).base());
  }
}

bool Schedule::in_forward(const Unit& unit) const {
  return std::any_of(
      in_forward_.begin(), in_forward_.end(), [&](const Unit* other) {
        return other == &unit || other->contains(unit) || unit.contains(*other);
      });
}

void Schedule::finish_reductions() {
  while (!reducing_.empty()) {
    Unit* oldest = reducing_.front();
    reducing_.pop_front();
    auto used = oldest->finish_reduction();
    if (!used.empty()) {
      reduced_.emplace_back(oldest, std::move(used));
    }
  }
}

void Schedule::add(Unit& unit) {
  units_.push_back(&unit);
}

void Schedule::forget(Unit& unit) {
  std::erase(units_, &unit);
  std::erase(full_, &unit);
  std::erase(reducing_, &unit);
  std::erase_if(
      reduced_, [&](const auto& entry) { return entry.first == &unit; });
  std::erase(in_forward_, &unit);
  Unit* const gone = nullptr;
  std::replace(order_.begin(), order_.end(), &unit, gone);
  std::replace(next_order_.begin(), next_order_.end(), &unit, gone);
  orders_.erase(&unit);
  for (auto& [first, order] : orders_) {
    std::replace(order.begin(), order.end(), &unit, gone);
  }
  if (last_touched_ == &unit) {
    last_touched_ = nullptr;
  }
}

void Schedule::recover() {
  failure_ = nullptr;
  reducing_.clear();
  reduced_.clear();
  for (Unit* unit : units_) {
    unit->drop_reduction();
    unit->release_hooks();
  }
  for (Unit* unit : std::vector<Unit*>(full_)) {
    try {
      unit->reshard();
    } catch (const std::exception&) {
      // Its gather failed; the exception that brought us here says more.
    }
  }
  order_.clear();
  next_order_.clear();
  orders_.clear();
  predicts_ = false;
  iteration_ended_ = true;
  last_touched_ = nullptr;
  hash_ = 0;
  unchecked_gathers_ = 0;
}

void Schedule::mix_hash(char kind, const Unit& unit) {
  constexpr uint64_t kPrime = 1099511628211ULL; // FNV-1a
  const auto mix = [this](uint64_t value) { hash_ = (hash_ ^ value) * kPrime; };
  mix(static_cast<uint64_t>(kind));
  mix(static_cast<uint64_t>(unit.number()));
}

void Schedule::fail_after_hook(int rank) {
  const auto own = std::exchange(failure_, nullptr);
  if (own) {
    std::rethrow_exception(own);
  }
  raise(
      {.call = "backward", .rank = group_.rank(), .world_size = group_.size()},
      "a hook that was registered on a shard threw on rank " +
          std::to_string(group_.global_ranks()[static_cast<size_t>(rank)]) +
          "; see that rank's own error.");
}

/// Throws on all ranks unless they did the same. Returns whether any of them
/// passed true.
bool Schedule::compare_hash(bool flag, int64_t plain) {
  unchecked_gathers_ = 0;
  const auto mine = static_cast<int64_t>(std::exchange(hash_, 0));
  if (group_.size() == 1) {
    if (failure_) {
      fail_after_hook(0);
    }
    return flag;
  }
  const int64_t flags = (flag ? 1 : 0) | (failure_ ? 2 : 0) | (plain & ~3);
  const at::Tensor sent = at::empty({2}, at::kLong);
  sent.mutable_data_ptr<int64_t>()[0] = mine;
  sent.mutable_data_ptr<int64_t>()[1] = flags;
  const at::Tensor all = at::empty({group_.size(), 2}, at::kLong);
  group_.all_gather_into(all, sent, "order of collectives");
  const int64_t* received = all.const_data_ptr<int64_t>();
  bool any = false;
  bool is_plain_equal = true;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const int64_t theirs = received[2 * rank + 1];
    any = any || (theirs & 1) != 0;
    is_plain_equal = is_plain_equal && (theirs & ~3) == (received[1] & ~3);
    if (received[2 * rank] != received[0]) {
      recover();
      raise<DisagreementError>(
          {.call = "backward",
           .rank = group_.rank(),
           .world_size = group_.size()},
          "ranks gathered or reduced different units in this step, so gradients may be mixed up. A forward must touch the same units in the same order on every rank; look for a branch that depends on the rank or its data. TESSERA_CHECK=1 names the first call that differs.");
    }
  }
  for (int rank = 0; rank < group_.size(); ++rank) {
    if ((received[2 * rank + 1] & 2) != 0) {
      fail_after_hook(rank);
    }
  }
  if (!is_plain_equal) {
    plain_.compare(group_);
  }
  return any;
}

} // namespace tessera::engine
