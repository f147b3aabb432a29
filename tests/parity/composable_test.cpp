// test/distributed/_composable/fully_shard/test_fully_shard_optim_checkpoint.py:
// optimizer state of FSDP and of fully_shard is the same.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/state_dict.h>

#include "parity/optim_state_support.h"
#include "support/device.h"

namespace tessera {
namespace {

using parity::CompositeParamModel;
using parity::CompositeParamModelImpl;
using parity::expect_same_state;
using parity::is_close;
using parity::LeafRuns;
using parity::make_composite;
using parity::on_two_and_four_ranks;
using tessera::testing::test_device;

constexpr double kComposableLearningRate = 1e-2;

/// A model and its optimizer, after one step.
struct Trained {
  Trained(CompositeParamModelImpl& module, const at::Tensor& batch)
      : model(module), optim(parameters(module), kComposableLearningRate) {
    optim.zero_grad();
    model.forward(batch).sum().backward();
    optim.step();
  }

  CompositeParamModelImpl& model;
  optim::Adam optim;
};

/// A new optimizer that loads `saved` has what the one it came from has.
void expect_reloads(Trained& trained, const StateDict& saved) {
  const StateDict own = optim::state_dict(trained.optim);
  optim::Adam reloaded(parameters(trained.model), kComposableLearningRate);
  optim::load_state_dict(
      reloaded,
      optim_state_dict_to_load(
          trained.model,
          trained.optim,
          saved,
          OptimStateToLoadOptions().is_named_optimizer(false)));
  const StateDict now = optim::state_dict(reloaded);
  EXPECT_EQ(now.keys(), own.keys());
  EXPECT_TRUE(is_close(now, own));
}

void check_save_load(
    CompositeParamModelImpl& orig,
    CompositeParamModelImpl& composable) {
  torch::manual_seed(1);
  const at::Tensor batch = torch::randn({2, 100}).to(test_device());
  Trained wrapped(orig, batch);
  Trained sharded(composable, batch);
  const StateDict saved1 = optim_state_dict(orig, wrapped.optim);
  // PyTorch's test names no type. Then fully_shard gives sharded tensors here,
  // and the state is the same.
  const StateDict unnamed = optim_state_dict(composable, sharded.optim);
  EXPECT_TRUE(unnamed.at("state")
                  .dict()
                  .at("u1.l1.weight")
                  .dict()
                  .at("exp_avg")
                  .is_sharded());
  expect_same_state(unnamed, saved1);
  expect_reloads(sharded, unnamed);
  set_state_dict_type(composable, StateDictType::FullStateDict);
  const StateDict saved2 = optim_state_dict(composable, sharded.optim);
  EXPECT_EQ(saved1.at("state").dict().size(), 15u);
  EXPECT_TRUE(is_close(saved1, saved2)); // names in "params" in order, too
  expect_reloads(wrapped, saved1);
  expect_reloads(sharded, saved2);

  // Stronger: each loads the other's, and sharded tensors are the same state.
  expect_reloads(wrapped, saved2);
  expect_reloads(sharded, saved1);
  set_state_dict_type(composable, StateDictType::ShardedStateDict);
  const StateDict in_shards = optim_state_dict(composable, sharded.optim);
  expect_same_state(in_shards, saved1);
  expect_reloads(sharded, in_shards);
}

CompositeParamModel make_on_device() {
  CompositeParamModel model = make_composite();
  model->to(test_device());
  return model;
}

TEST(TestOptimStateCheckpointing, test_optim_state_dict_save_load) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      CompositeParamModel composable = make_on_device();
      fully_shard(
          *composable,
          FullyShardOptions().policy(module_wrap_policy<parity::UnitModule>()));
      const FSDP orig(make_on_device());
      EXPECT_EQ(parameters(*orig).size(), 1u);
      EXPECT_EQ(fsdp_units(*composable).size(), 3u);
      check_save_load(*orig, *composable);
    });
  });
}

TEST(TestOptimStateCheckpointing, test_optim_state_dict_submodule_fully_shard) {
  on_two_and_four_ranks([](const Group&, LeafRuns& leaves) {
    leaves.run("", [] {
      CompositeParamModel composable = make_on_device();
      fully_shard(*composable->u1);
      fully_shard(*composable->u2);
      const FSDP orig(make_on_device());
      check_save_load(*orig, *composable);
    });
  });
}

} // namespace
} // namespace tessera
