// test/distributed/checkpoint/fsdp/test_fsdp_dsd.py: state of modules that are
// sharded parameter by parameter.
#include <tessera/fsdp/distributed_state_dict.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/model_state.h>

#include <algorithm>

#include "parity/models.h"
#include "parity/support.h"
#include "support/device.h"

namespace tessera {
namespace {

using parity::Chain;
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
  for (const FsdpUnit& unit : fsdp_modules(model)) {
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

} // namespace
} // namespace tessera
