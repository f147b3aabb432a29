// Muon's state moves between shardings, and training continues as if it had
// not moved.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/optim/state_dict.h>
#include <tessera/train/training_state.h>
#include <tessera/transfer/distributed_state_dict.h>

#include "checkpoint/support.h"
#include "optim/muon_model.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::TempFolder;

/// A model whose matrices Muon steps and whose vectors AdamW steps.
struct SavedTrial {
  Matrices model{/*has_vectors=*/true};
  Group group; // the ranks that have the parts; not valid if it is whole
  MuonWithAdamW optimizers;

  explicit SavedTrial(
      const std::optional<FullyShardOptions>& options = std::nullopt) {
    if (options) {
      group = *options->group();
      shard(model, *options);
    }
    optimizers = muon_with_adamw(model, 0.02, 0.01);
  }

  void step(int number) {
    if (group.valid()) {
      set_sharded_gradients(model, group, number, /*has_vectors=*/true);
    } else {
      set_gradients(model, number);
    }
    optimizers.step();
    optimizers.zero_grad();
  }
};

FullyShardOptions over(const Group& group, ShardLayout layout) {
  return FullyShardOptions().group(group).layout(layout);
}

/// Parameters and state; momentum too, so to the bit.
void expect_same(SavedTrial& found, SavedTrial& wanted) {
  const auto options = StateDictOptions().full_state_dict(true);
  const auto own = get_state_dict(found.model, found.optimizers, options);
  const auto other = get_state_dict(wanted.model, wanted.optimizers, options);
  EXPECT_EQ(diff_state_dicts(own.model, other.model), "");
  EXPECT_EQ(diff_state_dicts(own.optimizer, other.optimizer), "");
}

TEST(MuonStateTest, MovesFromTwoFlatRanksToFourByRows) {
  on_ranks(4, [](const Group& world) {
    SavedTrial plain;
    plain.step(0);
    plain.step(1);
    const auto two = world.subgroup({0, 1}, "two");
    ModelAndOptimizerState state;
    if (two) {
      SavedTrial run(over(*two, ShardLayout::Flat));
      run.step(0);
      run.step(1);
      state = get_state_dict(
          run.model,
          run.optimizers,
          StateDictOptions().full_state_dict(true).cpu_offload(true));
    }
    SavedTrial run(over(world, ShardLayout::Dim0));
    set_state_dict(
        run.model,
        run.optimizers,
        state,
        StateDictOptions().full_state_dict(true).broadcast_from_rank0(true));
    expect_same(run, plain);
    run.step(2);
    plain.step(2);
    expect_same(run, plain);
  });
}

TEST(MuonStateTest, MovesThroughACheckpoint) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    SavedTrial plain;
    plain.step(0);
    const auto two = world.subgroup({0, 1}, "two");
    if (two) {
      SavedTrial run(over(*two, ShardLayout::Flat));
      run.step(0);
      TrainingState training(run.model, run.optimizers);
      checkpoint::save(
          training,
          folder.path() / "step_1",
          checkpoint::SaveOptions().group(*two));
    }
    world.barrier();
    SavedTrial rows(over(world, ShardLayout::Dim0));
    TrainingState training(rows.model, rows.optimizers);
    checkpoint::load(training, folder.path() / "step_1");
    rows.step(1);

    SavedTrial whole;
    TrainingState whole_training(whole.model, whole.optimizers);
    checkpoint::load(whole_training, folder.path() / "step_1");
    whole.step(1);

    plain.step(1);
    expect_same(rows, plain);
    expect_same(whole, plain);
  });
}

TEST(MuonStateTest, RanksWithNothingOfAMatrixKeepNoMomentum) {
  on_ranks(4, [](const Group& world) {
    SavedTrial run(over(world, ShardLayout::Dim0));
    run.step(0);
    for (const at::Tensor& param : parameters(run.model)) {
      const auto& optimizer = *run.optimizers.muon;
      const auto& params = optimizer.param_groups()[0].params();
      const bool is_muons =
          std::any_of(params.begin(), params.end(), [&](const auto& one) {
            return one.is_same(param);
          });
      if (is_muons) {
        EXPECT_EQ(optimizer.find_state(param) == nullptr, param.numel() == 0);
      }
    }
  });
}

} // namespace
} // namespace tessera::optim
