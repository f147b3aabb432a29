// Models built under DeferredInit and then sharded.
#include <tessera/deferred/deferred_init.h>
#include <tessera/fsdp/fsdp.h>

#include "engine/unit.h"
#include "fsdp/training.h"
#include "support/memory_meter.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

Stack make_deferred(bool tied = false) {
  torch::manual_seed(3);
  const DeferredInit deferred;
  Stack model(kVocabulary, kWidth, kDepth, tied);
  model->to(at::kDouble);
  return model;
}

void expect_equal_to_plain(Stack& model, bool tied = false) {
  auto plain = make_stack(tied);
  const auto theirs = plain->named_parameters();
  auto guard = summon_full_params(*model);
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), theirs[item.key()])) << item.key();
  }
  guard.close();
}

class DeferredShardTest : public ::testing::TestWithParam<int> {};

TEST_P(DeferredShardTest, HasTheNumbersOfPlainConstruction) {
  on_ranks(GetParam(), [](const Group& world) {
    for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      auto model = make_deferred();
      EXPECT_TRUE(is_deferred(model->head));
      // Not in the order of construction.
      for (int64_t i = kDepth - 1; i >= 0; --i) {
        fully_shard(
            *model->blocks->ptr(static_cast<size_t>(i)),
            FullyShardOptions().layout(layout));
      }
      fully_shard(*model, FullyShardOptions().layout(layout));
      EXPECT_FALSE(is_deferred(model->head));
      expect_equal_to_plain(model);
      auto reference = train_plain(world.size());
      train_sharded(model, world.rank());
      expect_same_parameters(
          model, reference.model, world.size() == 1 ? 0 : 1e-9);
    }
  });
}

TEST_P(DeferredShardTest, HandlesAndTiedWeightsToo) {
  on_ranks(GetParam(), [](const Group&) {
    for (const bool tied : {false, true}) {
      for (const bool sync : {false, true}) {
        auto module = make_deferred(tied);
        const FSDP model(
            module,
            FSDPOptions()
                .auto_wrap_policy(module_wrap_policy<Block>())
                .sync_module_states(sync));
        expect_equal_to_plain(module, tied);
        if (tied) {
          EXPECT_TRUE(module->head.is_same(module->embed->weight));
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    DeferredShardTest,
    ::testing::Values(1, 2, 3, 4),
    ::testing::PrintToStringParamName());

TEST(DeferredShardMemoryTest, PeaksBelowShardsAndOneParameter) {
  on_ranks(2, [](const Group& world) {
    constexpr int64_t kSize = 512;
    constexpr int kLayers = 8;
    constexpr double kParamBytes = kSize * kSize * 4.0;
    MemoryMeter meter;
    torch::nn::Sequential model;
    {
      const DeferredInit deferred;
      for (int i = 0; i < kLayers; ++i) {
        model->push_back(torch::nn::Linear(
            torch::nn::LinearOptions(kSize, kSize).bias(false)));
      }
    }
    EXPECT_LT(static_cast<double>(meter.peak_bytes()), 0.2 * kParamBytes);
    for (const auto& layer : model->children()) {
      fully_shard(*layer);
    }
    fully_shard(*model);
    const double shards = kLayers * kParamBytes / world.size();
    EXPECT_LE(
        static_cast<double>(meter.peak_bytes()), 1.05 * (shards + kParamBytes));
    EXPECT_GE(static_cast<double>(meter.live_bytes()), shards);
  });
}

TEST(DeferredShardMemoryTest, BuffersAndIgnoredParametersGetTheirValues) {
  on_ranks(2, [](const Group&) {
    const auto make = [] {
      torch::manual_seed(9);
      return torch::nn::Sequential(
          torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    };
    auto plain = make();
    torch::nn::Sequential model{nullptr};
    {
      const DeferredInit deferred;
      model = make();
    }
    const FSDP handle(model, FSDPOptions().ignored_modules({model->ptr(0)}));
    EXPECT_TRUE(
        torch::equal(model[0]->parameters()[0], plain[0]->parameters()[0]));
    EXPECT_TRUE(torch::equal(
        model->named_buffers()["1.running_var"], torch::ones({4})));
    EXPECT_EQ(engine::unit_of(model[0]->parameters()[0]), nullptr);
  });
}

} // namespace
} // namespace tessera
