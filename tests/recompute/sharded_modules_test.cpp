// apply_activation_checkpointing() on sharded modules.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/unit.h"
#include "fsdp/models.h"
#include "recompute/support.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using torch::nn::Linear;
using torch::nn::Module;
using torch::nn::Sequential;

class RecomputeShardedModulesTest
    : public ::testing::TestWithParam<std::tuple<ShardLayout, bool>> {};

TEST_P(RecomputeShardedModulesTest, TrainsAsWithoutUnderTheSameNames) {
  on_ranks(2, [](const Group& world) {
    const auto [layout, wraps_first] = GetParam();
    const auto options = FullyShardOptions().layout(layout);
    const auto train = [&, wraps_first = wraps_first](bool recomputes) {
      torch::manual_seed(12);
      auto root = std::make_shared<Module>();
      Sequential model{Block(kWidth), Block(kWidth), Linear(kWidth, 2)};
      root->register_module("layers", model);
      if (recomputes && wraps_first) {
        EXPECT_EQ(apply_activation_checkpointing<Block>(*root), 2);
      }
      for (size_t i = 0; i < 2; ++i) {
        fully_shard(*model[i], options);
      }
      if (recomputes && !wraps_first) {
        EXPECT_EQ(apply_activation_checkpointing<Block>(*root), 2);
      }
      fully_shard(*root, options);
      for (const auto& parameter : model[0]->parameters()) {
        EXPECT_EQ(engine::unit_of(parameter)->name(), "layers.0");
      }
      torch::optim::AdamW optimizer(
          parameters(*root), torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < 3; ++step) {
        model->forward(noise({3, kWidth}, 10 * step + world.rank()))
            .square()
            .mean()
            .backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return named_parameters(*root);
    };
    const auto expected = train(false);
    const auto found = train(true);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_EQ(found[i].first, expected[i].first);
      expect_same(found[i].second, expected[i].second);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    RecomputeShardedModulesTest,
    ::testing::Combine(
        ::testing::Values(ShardLayout::Flat, ShardLayout::Dim0),
        ::testing::Bool()),
    [](const auto& test) {
      return std::string(
                 std::get<0>(test.param) == ShardLayout::Flat ? "Flat"
                                                              : "Dim0") +
          (std::get<1>(test.param) ? "Wrapped" : "ShardedFirst");
    });

} // namespace
} // namespace tessera
