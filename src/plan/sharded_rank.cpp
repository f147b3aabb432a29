#include "plan/sharded_rank.h"

#include <algorithm>
#include <utility>

#include "plan/checked.h"

namespace tessera::plan {
namespace {

/// A hash and a flag from each rank, see engine/order_check.h.
constexpr int64_t kOrderBytes = 16;

} // namespace

ShardedRank::ShardedRank(
    const Model& model,
    const TrainingSetup& setup,
    Account& account)
    : setup_(setup),
      account_(account),
      home_(
          setup.offload && setup.device != Device::Cpu ? account.host
                                                       : account.device),
      pool_(account.device, setup.device == Device::Cpu),
      sizes_(sizes_of(model, setup)),
      root_(model.root()),
      overlap_bytes_(setup.overlap_bytes.value_or(
          engine::default_overlap_bytes(setup.device == Device::Cpu))) {
  for (const NamedUnit& unit : model.units) {
    const UnitSizes& sizes = sizes_[unit.kind];
    units_.push_back({.sizes = &sizes});
    units_.back().has_gradient.resize(sizes.full_gradients.size());
    home_.add(Kind::Shards, sizes.shard());
  }
}

void ShardedRank::begin_forward() {
  in_backward_ = false;
}

void ShardedRank::begin_backward(bool reduces) {
  in_backward_ = true;
  begins_backward_ = true;
  reduces_ = reduces;
}

void ShardedRank::touch(size_t unit) {
  const auto describe = [&](int held) {
    const auto other = static_cast<size_t>(held);
    return engine::GatherOrder::HeldUnit{
        .is_touched = other == unit,
        .is_above = other == root_,
        .is_gathering = units_[other].state == State::Gathering,
        .is_kept = !setup_.reshard_after_forward};
  };
  for (const int other : order_.to_free(in_backward_, describe)) {
    reshard(static_cast<size_t>(other));
  }
  const bool begins_backward = std::exchange(begins_backward_, false);
  if (units_[unit].state != State::Full) {
    start_gather(unit);
    finish_gather(unit);
    order_.record(static_cast<int>(unit));
    gather_ahead(unit);
  } else if (order_.record_stayed(static_cast<int>(unit)) || begins_backward) {
    gather_ahead(unit);
  }
}

void ShardedRank::gather_ahead(size_t in_use) {
  for (const int unit : order_.to_gather(
           in_backward_, static_cast<int>(in_use), [this](int number) {
             return needed(number);
           })) {
    start_gather(static_cast<size_t>(unit));
  }
}

engine::GatherOrder::NeededUnit ShardedRank::needed(int number) const {
  const auto place = static_cast<size_t>(number);
  const Unit& unit = units_[place];
  return {
      .is_root = place == root_,
      .is_full = unit.state == State::Full,
      .is_sharded = unit.state == State::Sharded,
      .may_be_gathered =
          engine::is_worth_gathering_ahead(setup_.shards, setup_.offload),
      .accumulates = !reduces_,
      .bytes = unit.sizes->full(),
      .overlap_bytes = overlap_bytes_};
}

void ShardedRank::start_gather(size_t unit) {
  if (units_[unit].state != State::Sharded) {
    return;
  }
  units_[unit].state = State::Gathering;
  order_.hold(static_cast<int>(unit));
  const bool casts = !std::exchange(units_[unit].has_cast, true);
  for (const BundleSizes& bundle : units_[unit].sizes->bundles) {
    if (casts && bundle.cast > 0) {
      account_.device.add(Kind::Full, bundle.cast); // and keeps it
    }
    if (bundle.shows_shard) {
      continue;
    }
    pool_.take(bundle.gathered, Kind::Full);
    note_sent(
        units_[unit],
        count_shards(
            in_backward_ ? Operation::GatherBackward : Operation::GatherForward,
            bundle,
            bundle.gathered));
  }
}

void ShardedRank::note_sent(Unit& unit, int64_t sent_bytes) {
  unit.arrives_at = std::max(unit.arrives_at, account_.clock.send(sent_bytes));
}

int64_t ShardedRank::count_copies(const BundleSizes& bundle) {
  return account_.wire.count_sum(
      Operation::AllReduce, bundle.reduced, setup_.copies);
}

int64_t ShardedRank::count_shards(
    Operation operation,
    const BundleSizes& bundle,
    int64_t bytes) {
  return bundle.travels_whole
      ? account_.wire.count_sum(operation, bytes, setup_.shards)
      : account_.wire.count(operation, bytes, setup_.shards);
}

void ShardedRank::finish_gather(size_t unit) {
  if (units_[unit].state != State::Gathering) {
    return;
  }
  units_[unit].state = State::Full;
  account_.clock.wait_until(units_[unit].arrives_at);
  for (const BundleSizes& bundle : units_[unit].sizes->bundles) {
    if (!bundle.shows_shard && bundle.copies_out) {
      pool_.take(bundle.full, Kind::Full);
      pool_.give(bundle.gathered, Kind::Full);
    } // else the same memory
  }
}

void ShardedRank::reshard(size_t unit) {
  finish_gather(unit); // the memory is still being written
  if (units_[unit].state != State::Full) {
    return;
  }
  units_[unit].state = State::Sharded;
  for (const BundleSizes& bundle : units_[unit].sizes->bundles) {
    if (!bundle.shows_shard) {
      pool_.give(bundle.full, Kind::Full);
    }
  }
  order_.free(static_cast<int>(unit));
}

void ShardedRank::add_gradient(size_t unit, size_t param) {
  Unit& owner = units_[unit];
  const int64_t bytes = owner.sizes->full_gradients[param];
  if (owner.has_gradient[param]) { // added to the one that is there
    account_.device.touch(Kind::Gradients, bytes);
    return;
  }
  owner.has_gradient[param] = true;
  owner.gradient_bytes += bytes;
  account_.device.add(Kind::Gradients, bytes);
}

/// Copies the full gradients to a buffer, in the dtype of the reduction.
void ShardedRank::store_gradients(Unit& unit) {
  for (const BundleSizes& bundle : unit.sizes->bundles) {
    if (setup_.shards == 1) { // becomes the shard's gradient
      account_.device.add(Kind::Gradients, bundle.gradients);
    } else {
      pool_.take(bundle.gradients, Kind::Gradients);
    }
    if (unit.waits && setup_.shards == 1) { // was added to the new one
      account_.device.drop(Kind::Gradients, bundle.gradients);
    } else if (unit.waits) {
      pool_.give(bundle.gradients, Kind::Gradients);
    }
  }
  account_.device.drop(Kind::Gradients, unit.gradient_bytes);
  unit.gradient_bytes = 0;
  unit.has_gradient.assign(unit.has_gradient.size(), false);
  unit.waits = true;
}

void ShardedRank::finish_unit(size_t unit) {
  carry_out(reductions_.make_room(
      static_cast<int>(unit), units_[unit].sizes->gradients(), overlap_bytes_));
  store_gradients(units_[unit]);
  if (unit != root_ && !order_.is_wanted(static_cast<int>(unit))) {
    reshard(unit);
  }
  if (reduces_) {
    start_reduction(unit);
  }
}

void ShardedRank::start_reduction(size_t unit) {
  reductions_.start(
      static_cast<int>(unit),
      units_[unit].sizes->gradients(),
      setup_.shards > 1 && setup_.copies > 1);
  for (const BundleSizes& bundle : units_[unit].sizes->bundles) {
    if (setup_.shards > 1) {
      account_.device.add(Kind::Gradients, bundle.reduced);
      note_sent(
          units_[unit],
          count_shards(Operation::ReduceScatter, bundle, bundle.gradients));
    } else {
      note_sent(units_[unit], count_copies(bundle));
    }
  }
}

/// See engine::Reductions.
void ShardedRank::carry_out(
    const std::vector<engine::ReductionOrder::Advance>& steps) {
  for (const auto& [number, to] : steps) {
    Unit& unit = units_[static_cast<size_t>(number)];
    account_.clock.wait_until(unit.arrives_at);
    if (unit.waits) { // its full gradients travelled
      give_gradients(unit);
    }
    if (to == engine::ReductionOrder::Advance::To::Copies) {
      for (const BundleSizes& bundle : unit.sizes->bundles) {
        note_sent(unit, count_copies(bundle)); // only now
      }
    } else {
      take_average(unit);
    }
  }
}

void ShardedRank::give_gradients(Unit& unit) {
  unit.waits = false;
  for (const BundleSizes& bundle : unit.sizes->bundles) {
    if (setup_.shards > 1) {
      pool_.give(bundle.gradients, Kind::Gradients);
    }
  }
}

void ShardedRank::take_average(Unit& unit) {
  for (const BundleSizes& bundle : unit.sizes->bundles) {
    if (bundle.converts_gradient) {
      home_.add(Kind::Gradients, bundle.shard_gradient);
      account_.device.drop(Kind::Gradients, bundle.reduced);
    }
  }
  if (unit.has_shard_gradient) { // added to that of earlier backwards
    for (const BundleSizes& bundle : unit.sizes->bundles) {
      home_.drop(Kind::Gradients, bundle.shard_gradient);
    }
  }
  unit.has_shard_gradient = true;
}

void ShardedRank::end_backward() {
  carry_out(reductions_.finish());
  for (const int unit :
       order_.to_free_at_end([this](int number) { return needed(number); })) {
    reshard(static_cast<size_t>(unit));
  }
  order_.end_iteration();
  pool_.trim();
  account_.clock.wait_until(account_.clock.send(account_.wire.count(
      Operation::Agreement,
      times(kOrderBytes, setup_.world()),
      setup_.world())));
}

void ShardedRank::step() {
  int64_t like_params = 0;
  for (Unit& unit : units_) {
    like_params = plus(like_params, unit.sizes->own());
    for (const BundleSizes& bundle : unit.sizes->bundles) {
      if (!has_state_ && counts_steps(setup_.optimizer)) {
        home_.add(Kind::Optimizer, kStepBytes * bundle.num_own);
      }
    }
  }
  if (!has_state_) {
    home_.add(Kind::Optimizer, times(like_params, states_of(setup_.optimizer)));
    has_state_ = true;
  }
  home_.touch(
      Kind::Optimizer,
      times(like_params, temporaries_of(setup_.optimizer, setup_.device)));
  for (Unit& unit : units_) {
    if (unit.has_shard_gradient) {
      for (const BundleSizes& bundle : unit.sizes->bundles) {
        home_.drop(Kind::Gradients, bundle.shard_gradient);
      }
    }
    unit.has_shard_gradient = false;
  }
}

} // namespace tessera::plan
