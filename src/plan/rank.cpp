#include "plan/rank.h"

#include "plan/replicated_rank.h"
#include "plan/sharded_rank.h"

namespace tessera::plan {

std::unique_ptr<Rank> make_rank(
    const Model& model,
    const TrainingSetup& setup,
    Account& account) {
  account.device.add(Kind::Buffers, model.buffer_bytes);
  if (setup.engine == Engine::Sharded) {
    return std::make_unique<ShardedRank>(model, setup, account);
  }
  return std::make_unique<ReplicatedRank>(model, setup, account);
}

} // namespace tessera::plan
