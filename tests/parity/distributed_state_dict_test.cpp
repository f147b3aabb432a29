// test/distributed/checkpoint/fsdp/test_fsdp_dsd.py: state of modules that are
// sharded parameter by parameter.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/wrap_policy.h>
#include <tessera/optim/state_dict.h>
#include <tessera/transfer/distributed_state_dict.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/optim_state.h>
#include <tessera/transfer/state_dict_type.h>

#include <algorithm>

#include "checkpoint/support.h"
#include "parity/models.h"
#include "parity/support.h"
#include "support/device.h"

namespace tessera {
namespace {

using parity::Chain;
using parity::ChainImpl;
using parity::is_close;
using parity::LeafRuns;
using parity::make_mlp_stack;
using parity::on_two_and_four_ranks;
using tessera::testing::test_device;

/// The stack with each of its elements as a unit, and the whole.
Chain shard_mlp_stack(int64_t dim, bool reshard_after_forward = true) {
  const auto options = FullyShardOptions()
                           .layout(ShardLayout::Dim0)
                           .reshard_after_forward(reshard_after_forward);
  Chain model = make_mlp_stack(dim);
  model->to(test_device());
  for (size_t i = 0; i < model->size(); ++i) {
    fully_shard(*model->ptr(i), options);
  }
  fully_shard(*model, options);
  return model;
}

int64_t num_allocated(torch::nn::Module& model) {
  int64_t sum = 0;
  for (const FSDPUnit& unit : fsdp_units(model)) {
    sum += unit.allocated_numel();
  }
  return sum;
}

/// How many of `rows` a rank has: chunks of the same size, as long as there are
/// rows.
int64_t local_rows(int64_t rows, const Group& world) {
  const int64_t chunk = (rows + world.size() - 1) / world.size();
  return std::clamp<int64_t>(rows - world.rank() * chunk, 0, chunk);
}

/// Expects the rows of `base` that are this rank's, as sharded tensors.
void expect_shards_of(
    const StateDict& dict,
    const Chain& base,
    const Group& world) {
  const auto expected = base->named_parameters();
  EXPECT_EQ(expected.size(), 14u);
  ASSERT_EQ(dict.size(), expected.size());
  for (const auto& item : expected) {
    SCOPED_TRACE(item.key());
    const StateValue* value = dict.find(item.key());
    ASSERT_NE(value, nullptr);
    ASSERT_TRUE(value->is_sharded()) << value->kind();
    const ShardedTensor& sharded = value->sharded();
    EXPECT_EQ(sharded.sizes(), item.value().sizes().vec());
    const int64_t rows = item.value().size(0);
    EXPECT_EQ(
        sharded.local_numel(),
        local_rows(rows, world) * (item.value().numel() / rows));
    EXPECT_TRUE(is_close(sharded.full_tensor(), item.value()));
  }
}

void check_model_state_dict(const Group& world, int64_t dim) {
  const Chain base = make_mlp_stack(dim);
  Chain model1 = shard_mlp_stack(dim);
  const StateDict own1 = state_dict(*model1);
  const StateDict distributed1 = get_model_state_dict(*model1);
  EXPECT_TRUE(is_close(distributed1, own1));
  EXPECT_EQ(distributed1.keys(), own1.keys());
  expect_shards_of(distributed1, base, world);

  Chain model2 = shard_mlp_stack(dim, /*reshard_after_forward=*/false);
  model2(torch::randn({2, dim}).to(test_device()));
  EXPECT_GT(num_allocated(*model2), 0); // or there is nothing to test
  const StateDict own2 = state_dict(*model2);
  EXPECT_EQ(num_allocated(*model2), 0);
  const StateDict distributed2 = get_model_state_dict(*model2);
  EXPECT_TRUE(is_close(distributed2, own2));
  expect_shards_of(own2, base, world);
  expect_shards_of(distributed2, base, world);
  // Stronger: the other one reshards as well.
  model2(torch::randn({2, dim}).to(test_device()));
  EXPECT_GT(num_allocated(*model2), 0);
  expect_shards_of(get_model_state_dict(*model2), base, world);
  EXPECT_EQ(num_allocated(*model2), 0);
}

TEST(
    TestFullyShardWithDistributedStateDict,
    test_1d_fsdp_get_model_state_dict) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    for (const int64_t dim : {2, 3, 4, 5}) {
      leaves.run("mlp_dim " + std::to_string(dim), [&] {
        check_model_state_dict(world, dim);
      });
    }
  });
}

TEST(
    TestFullyShardWithDistributedStateDict,
    test_1d_fsdp_cpu_offload_full_model_state_dict) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("", [&] {
      Chain orig = make_mlp_stack(2);
      Chain sharded = shard_mlp_stack(2);
      const StateDict expected = state_dict(*orig);
      const StateDict full = get_model_state_dict(
          *sharded, StateDictOptions().full_state_dict(true).cpu_offload(true));
      if (world.rank() != 0) {
        EXPECT_TRUE(full.empty()) << full;
        return;
      }
      EXPECT_EQ(full.size(), 14u);
      EXPECT_TRUE(is_close(full, expected));
      // PyTorch looks at the plain model's here.
      for (const auto& [name, value] : full) {
        ASSERT_TRUE(value.is_tensor()) << name.text();
        EXPECT_TRUE(value.tensor().is_cpu()) << name.text();
      }
    });
  });
}

/// What a model and its optimizer hold, whole, on rank 0.
ModelAndOptimizerState full_state(
    torch::nn::Module& model,
    torch::optim::Optimizer& optimizer) {
  return get_state_dict(
      model,
      {optimizer},
      StateDictOptions().full_state_dict(true).cpu_offload(true));
}

void check_save_with_fsdp1_and_load_with_fsdp2(
    const Group& world,
    StateDictType type) {
  const testing::TempFolder folder(world);
  torch::manual_seed(1);
  Chain model1 = make_mlp_stack(2, /*seed=*/1);
  model1->to(test_device());
  const FSDP<ChainImpl> fsdp1(
      model1,
      FSDPOptions().use_orig_params(true).auto_wrap_policy(
          always_wrap_policy()));
  torch::optim::Adam optim1(
      parameters(*model1), torch::optim::AdamOptions(0.1));
  model1(torch::randn({2}).to(test_device())).sum().backward();
  optim1.step();
  {
    const StateDictTypeGuard guard(*model1, type);
    const StateDict model_state = state_dict(*model1);
    EXPECT_EQ(
        model_state.begin()->second.is_sharded(),
        type == StateDictType::ShardedStateDict);
    checkpoint::save(
        {{"model", model_state},
         {"optim", sharded_optim_state_dict(*model1, optim1)}},
        folder / "checkpoint");
  }
  const auto expected = full_state(*model1, optim1);

  Chain model2 = make_mlp_stack(2, /*seed=*/2);
  model2->to(test_device());
  const auto options = FullyShardOptions().layout(ShardLayout::Dim0);
  for (size_t i = 0; i < model2->size(); ++i) {
    fully_shard(*model2->ptr(i), options);
  }
  fully_shard(*model2, options);
  torch::optim::Adam optim2(
      parameters(*model2), torch::optim::AdamOptions(0.1));
  auto target = get_state_dict(*model2, {optim2});
  if (world.rank() == 0) { // or loading proves nothing
    EXPECT_NE(
        diff_state_dicts(full_state(*model2, optim2).model, expected.model),
        "");
  } else {
    full_state(*model2, optim2);
  }
  StateDict state{{"model", target.model}, {"optim", target.optimizer}};
  checkpoint::load(state, folder / "checkpoint");
  load_state_dict(*model2, state.at("model").dict());
  // Names and sharded tensors, by the optimizer's own call as in PyTorch.
  EXPECT_EQ(
      state.at_path("optim.param_groups.0.params").list().front(),
      StateValue("0.in_proj.weight"));
  EXPECT_TRUE(state.at("optim")
                  .dict()
                  .at("state")
                  .dict()
                  .begin()
                  ->second.dict()
                  .at("exp_avg")
                  .is_sharded());
  optim::load_state_dict(optim2, state.at("optim").dict());

  const auto actual = full_state(*model2, optim2);
  EXPECT_EQ(diff_state_dicts(actual.model, expected.model), "");
  EXPECT_EQ(diff_state_dicts(actual.optimizer, expected.optimizer), "");
  EXPECT_EQ(actual.model.empty(), world.rank() != 0);
  if (world.rank() == 0) {
    const StateDict& first =
        actual.optimizer.at("state").dict().begin()->second.dict();
    EXPECT_EQ(first.at("step").tensor().item<float>(), 1);
    EXPECT_EQ(
        actual.optimizer.at_path("param_groups.0.params").list(),
        expected.optimizer.at_path("param_groups.0.params").list());
  }
}

TEST(
    TestFullyShardWithDistributedStateDict,
    test_save_with_fsdp1_and_load_with_fsdp2) {
  on_two_and_four_ranks([](const Group& world, LeafRuns& leaves) {
    leaves.run("FULL_STATE_DICT", [&] {
      check_save_with_fsdp1_and_load_with_fsdp2(
          world, StateDictType::FullStateDict);
    });
    leaves.run("SHARDED_STATE_DICT", [&] {
      check_save_with_fsdp1_and_load_with_fsdp2(
          world, StateDictType::ShardedStateDict);
    });
  });
}

} // namespace
} // namespace tessera
