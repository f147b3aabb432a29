// A rank of fully_shard or FSDP: the states of engine::Unit, with bytes in
// place of tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/gather_order.h"
#include "engine/reduction_order.h"
#include "plan/pool.h"
#include "plan/rank.h"
#include "plan/unit_sizes.h"

namespace tessera::plan {

class ShardedRank : public Rank {
 public:
  ShardedRank(const Model& model, const TrainingSetup& setup, Account& account);

  void begin_forward() override;
  void begin_backward(bool reduces) override;
  void touch(size_t unit) override;
  void add_gradient(size_t unit, size_t param) override;
  void finish_unit(size_t unit) override;
  void end_backward() override;
  void step() override;

 private:
  enum class State { Sharded, Gathering, Full };
  struct Unit {
    const UnitSizes* sizes;
    State state = State::Sharded;
    std::vector<bool> has_gradient; // by parameter: full, in this backward
    int64_t gradient_bytes = 0; // of these
    bool waits = false; // a gradient buffer waits for a reduction
    bool has_shard_gradient = false;
    bool has_cast = false; // that is kept
    double arrives_at = 0; // what is gathered or reduced
  };

  void start_gather(size_t unit);
  void gather_ahead(size_t in_use);
  engine::GatherOrder::NeededUnit needed(int number) const;
  void note_sent(Unit& unit, int64_t sent_bytes);
  int64_t count_copies(const BundleSizes& bundle);
  int64_t count_shards(
      Operation operation,
      const BundleSizes& bundle,
      int64_t bytes);
  void finish_gather(size_t unit);
  void reshard(size_t unit);
  void store_gradients(Unit& unit);
  void start_reduction(size_t unit);
  void carry_out(const std::vector<engine::ReductionOrder::Advance>& steps);
  void give_gradients(Unit& unit);
  void take_average(Unit& unit);

  const TrainingSetup& setup_;
  Account& account_;
  Ledger& home_; // where shards are
  Pool pool_;
  const std::vector<UnitSizes> sizes_; // by kind
  std::vector<Unit> units_;
  const size_t root_; // stays full until the end of backward
  const int64_t overlap_bytes_;
  engine::GatherOrder order_;
  engine::ReductionOrder reductions_;
  bool in_backward_ = false;
  bool begins_backward_ = false; // nothing was touched in it
  bool reduces_ = true;
  bool has_state_ = false; // the optimizer
};

} // namespace tessera::plan
