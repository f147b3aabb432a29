// What ranks begin with: equal values, or an error before they are used.
#include "engine/start.h"

#include <tessera/comm/mesh.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/deferred/deferred_init.h>
#include <tessera/engine/seed.h>
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/summon.h>
#include <tessera/transfer/distributed_state_dict.h>

#include "fsdp/training.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

torch::nn::Sequential two_layers(uint64_t seed) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(
      torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
}

at::Tensor input() {
  return torch::ones({1, 3});
}

std::string error_of_forward(torch::nn::Sequential& model) {
  return error_of([&] { model->forward(input()); });
}

TEST(StartTest, DifferentValuesAreRefusedAtTheFirstUseOnEveryRank) {
  on_ranks(3, [](const Group& world) {
    auto model = two_layers(world.rank() == 1 ? 7 : 0);
    fully_shard(*model[0]);
    fully_shard(*model);
    const std::string error = error_of_forward(model);
    EXPECT_THAT(error, HasSubstr("rank 1 began with other values than rank 0"));
    EXPECT_THAT(error, HasSubstr("parameter \"weight\""));
    EXPECT_THAT(error, HasSubstr("tessera::seed"));
    // The error stays: nothing was gathered.
    EXPECT_EQ(error_of_forward(model), error);
    EXPECT_THAT(
        error_of([&] { summon_full_params(*model).close(); }),
        HasSubstr("began with other values"));
    EXPECT_THAT(
        error_of([&] { unshard(*model); }),
        HasSubstr("began with other values"));
  });
}

TEST(StartTest, OneElementIsEnough) {
  on_ranks(2, [](const Group& world) {
    auto model = two_layers(0);
    if (world.rank() == 1) { // in the part that rank 1 does not keep
      torch::NoGradGuard no_grad;
      model[0]->as<torch::nn::Linear>()->weight[0][0].add_(1e-6);
    }
    fully_shard(*model);
    EXPECT_THAT(error_of_forward(model), HasSubstr("rank 1 began"));
  });
}

TEST(StartTest, StateThatIsLoadedBeforeTheFirstUseReplacesThem) {
  on_ranks(2, [](const Group& world) {
    auto wanted = two_layers(3);
    const StateDict state = get_model_state_dict(*wanted);
    auto model = two_layers(static_cast<uint64_t>(world.rank()));
    fully_shard(*model);
    set_model_state_dict(*model, state);
    EXPECT_TRUE(torch::allclose(
        model->forward(input()), wanted->forward(input()), 1e-6, 1e-6));
  });
}

TEST(StartTest, AModelOfWhichAPartWasLoadedIsStillCompared) {
  on_ranks(2, [](const Group& world) {
    auto model = two_layers(static_cast<uint64_t>(world.rank()));
    fully_shard(*model[0]);
    fully_shard(*model);
    {
      torch::NoGradGuard no_grad;
      for (at::Tensor& leaf : parameters(*model[0])) {
        leaf.zero_();
      }
    }
    EXPECT_THAT(error_of_forward(model), HasSubstr("parameter \"1.weight\""));
  });
}

/// A backbone that is loaded must not hide that the ranks' new heads differ.
TEST(StartTest, AParameterThatWasWrittenHidesNoOtherOfItsUnit) {
  on_ranks(3, [](const Group& world) {
    for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      auto model = two_layers(static_cast<uint64_t>(world.rank()));
      fully_shard(*model, FullyShardOptions().layout(layout));
      {
        torch::NoGradGuard no_grad;
        for (const auto& [name, leaf] : named_parameters(*model)) {
          if (name != "1.weight") {
            leaf.zero_();
          }
        }
      }
      EXPECT_THAT(error_of_forward(model), HasSubstr("parameter \"1.weight\""));
    }
  });
}

TEST(StartTest, DeferredModelsAreComparedAfterTheirReplay) {
  on_ranks(2, [](const Group& world) {
    const auto build = [](uint64_t seed) {
      const DeferredInit deferred;
      return two_layers(seed);
    };
    auto equal = build(0);
    fully_shard(*equal);
    EXPECT_EQ(error_of_forward(equal), "nothing was thrown");
    auto different = build(static_cast<uint64_t>(world.rank()));
    fully_shard(*different);
    EXPECT_THAT(error_of_forward(different), HasSubstr("rank 1 began"));
  });
}

TEST(StartTest, CopiesOfHybridShardingAreComparedToo) {
  on_ranks(4, [](const Group& world) {
    const Mesh mesh = make_mesh({2, 2}, {"copies", "shards"});
    auto model = two_layers(world.rank() < 2 ? 0 : 1); // alike in each copy
    fully_shard(*model, FullyShardOptions().mesh(mesh));
    EXPECT_THAT(error_of_forward(model), HasSubstr("ranks 2, 3 began"));
  });
}

TEST(StartTest, OffTheyAreTakenAsTheyAre) {
  on_ranks(2, [](const Group& world) {
    auto model = two_layers(static_cast<uint64_t>(world.rank()));
    fully_shard(*model, FullyShardOptions().compare_start(false));
    EXPECT_EQ(error_of_forward(model), "nothing was thrown");
  });
}

TEST(StartTest, RankZerosValuesNeedNoComparison) {
  on_ranks(2, [](const Group& world) {
    auto expected = two_layers(0);
    auto model = two_layers(static_cast<uint64_t>(world.rank()));
    const FSDP handle(model, FSDPOptions().sync_module_states(true));
    EXPECT_TRUE(torch::allclose(
        model->forward(input()), expected->forward(input()), 1e-6, 1e-6));
  });
}

TEST(StartTest, RanksMustCompareAlike) {
  on_ranks(2, [](const Group& world) {
    auto model = two_layers(0);
    EXPECT_THAT(
        error_of([&] {
          fully_shard(
              *model, FullyShardOptions().compare_start(world.rank() == 0));
        }),
        HasSubstr("compare_start"));
  });
}

TEST(DigestTest, TellsValuesPlacesAndDtypesApart) {
  torch::manual_seed(0);
  const at::Tensor values = torch::randn({64, 128});
  EXPECT_EQ(engine::digest_of(values), engine::digest_of(values.clone()));
  EXPECT_EQ(
      engine::digest_of(values),
      engine::digest_of(values.t().contiguous().t()));
  EXPECT_NE(engine::digest_of(values), engine::digest_of(values.flip(0)));
  EXPECT_NE(
      engine::digest_of(values), engine::digest_of(values.to(torch::kDouble)));
  EXPECT_EQ(
      engine::digest_of(torch::empty({0})),
      engine::digest_of(torch::empty({0})));
}

/// What a device's digest is made of; its sums do not depend on the device.
TEST(DigestTest, SumsTellPlacesApart) {
  const at::Tensor zeros = torch::zeros({8192});
  const auto digest_with_one_at = [&](int64_t place) {
    at::Tensor values = zeros.clone();
    values[place] = 1;
    return engine::digest_by_sums(values);
  };
  const uint64_t first = digest_with_one_at(0);
  EXPECT_EQ(first, digest_with_one_at(0));
  for (const int64_t place : {1, 7, 8, 1024, 8191}) {
    EXPECT_NE(first, digest_with_one_at(place)) << place;
  }
}

TEST(SeedTest, ModelsAreEqualThenRanksDrawNumbersOfTheirOwn) {
  on_ranks(2, [](const Group& world) {
    seed(11);
    torch::nn::Linear model(3, 4);
    fully_shard(*model);
    model->forward(input());
    const at::Tensor drawn = torch::rand({4});
    const at::Tensor all = torch::zeros({2, 4});
    world.all_gather_into(all, drawn);
    EXPECT_FALSE(torch::equal(all[0], all[1]));
    seed(11);
    torch::nn::Linear again(3, 4);
    fully_shard(*again);
    again->forward(input());
    EXPECT_TRUE(torch::equal(torch::rand({4}), drawn)); // by the seed alone
  });
}

TEST(SeedTest, NumbersMayPartEarlierAndASeedOfTheUserIsKept) {
  on_ranks(2, [](const Group& world) {
    const at::Tensor all = torch::zeros({2, 4});
    seed(5);
    seed_per_rank();
    world.all_gather_into(all, torch::rand({4}));
    EXPECT_FALSE(torch::equal(all[0], all[1]));

    seed(5);
    torch::manual_seed(6);
    seed_per_rank();
    world.all_gather_into(all, torch::rand({4}));
    EXPECT_TRUE(torch::equal(all[0], all[1]));
  });
}

TEST(SeedTest, DistributedDataParallelPartsThemToo) {
  on_ranks(2, [](const Group& world) {
    seed(5);
    torch::nn::Linear model(3, 4);
    const DistributedDataParallel ddp(model);
    const at::Tensor all = torch::zeros({2, 4});
    world.all_gather_into(all, torch::rand({4}));
    EXPECT_FALSE(torch::equal(all[0], all[1]));
  });
}

} // namespace
} // namespace tessera
