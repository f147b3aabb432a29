// Muon on shards has the bits of one process.
#include <tessera/comm/mesh.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/summon.h>

#include "optim/muon_model.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::optim {
namespace {

using tessera::testing::error_of;
using tessera::testing::on_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kSteps = 3;

struct Setup {
  int num_ranks = 2;
  int num_copies = 1;
  ShardLayout layout = ShardLayout::Flat;
  int64_t batch_bytes = int64_t{16} << 20;
  std::string backend = "auto";
};

std::ostream& operator<<(std::ostream& out, const Setup& setup) {
  return out << setup.num_ranks << "Ranks" << setup.num_copies << "Copies"
             << (setup.layout == ShardLayout::Flat ? "Flat" : "Dim0")
             << (setup.batch_bytes < 1000 ? "SmallBatches" : "")
             << (setup.backend == "auto" ? "" : setup.backend);
}

/// The ranks that have the parts of one copy.
struct Sharding {
  FullyShardOptions options;
  Group group;

  Sharding(const Setup& setup, const Group& world) {
    options.layout(setup.layout);
    if (setup.num_copies == 1) {
      group = world;
      return;
    }
    const Mesh mesh(
        world,
        {setup.num_copies, setup.num_ranks / setup.num_copies},
        {"copy", "shard"});
    options.mesh(mesh);
    group = mesh.group("shard");
  }
};

void expect_same_bits(Matrices& sharded, Matrices& plain) {
  const auto wanted = plain->named_parameters();
  for (const auto& item : sharded->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value().detach().clone(), wanted[item.key()]))
        << item.key();
  }
}

tessera::testing::RanksOptions ranks_of(const Setup& setup) {
  return {.size = setup.num_ranks, .backend = setup.backend};
}

class MuonShardedTest : public ::testing::TestWithParam<Setup> {};

INSTANTIATE_TEST_SUITE_P(
    Setups,
    MuonShardedTest,
    ::testing::Values(
        Setup{.num_ranks = 2},
        Setup{.num_ranks = 2, .layout = ShardLayout::Dim0},
        Setup{.num_ranks = 3, .layout = ShardLayout::Dim0, .batch_bytes = 200},
        Setup{.num_ranks = 3, .batch_bytes = 1},
        Setup{.num_ranks = 3, .batch_bytes = 200, .backend = "gloo"},
        Setup{.num_ranks = 4, .batch_bytes = 200},
        Setup{.num_ranks = 4, .layout = ShardLayout::Dim0},
        Setup{.num_ranks = 4, .num_copies = 2},
        Setup{
            .num_ranks = 4,
            .num_copies = 2,
            .layout = ShardLayout::Dim0,
            .batch_bytes = 200},
        Setup{.num_ranks = 4, .num_copies = 4}),
    ::testing::PrintToStringParamName());

TEST_P(MuonShardedTest, MatchesSingleProcessToTheBit) {
  on_ranks(ranks_of(GetParam()), [](const Group& world) {
    const Sharding sharding(GetParam(), world);
    for (const bool nesterov : {true, false}) {
      const auto options =
          MuonOptions(0.02).nesterov(nesterov).weight_decay(0.3);
      Matrices plain;
      Muon reference(plain->parameters(), options);
      Matrices model;
      shard(model, sharding.options);
      Muon muon(parameters(model), options);
      muon.set_batch_bytes(GetParam().batch_bytes);
      for (int step = 0; step < kSteps; ++step) {
        set_gradients(plain, step);
        set_sharded_gradients(model, sharding.group, step);
        reference.step();
        muon.step();
        expect_same_bits(model, plain);
      }
    }
  });
}

TEST_P(MuonShardedTest, AParameterThatNoRankUsedIsLeftAlone) {
  on_ranks(ranks_of(GetParam()), [](const Group& world) {
    const Sharding sharding(GetParam(), world);
    Matrices plain;
    Muon reference(plain->parameters(), 0.02);
    Matrices model;
    shard(model, sharding.options);
    Muon muon(parameters(model), 0.02);
    muon.set_batch_bytes(GetParam().batch_bytes);
    for (int step = 0; step < kSteps; ++step) {
      set_gradients(plain, step);
      set_sharded_gradients(model, sharding.group, step);
      const auto missing = static_cast<size_t>(step + 3);
      plain->parameters()[missing].mutable_grad() = at::Tensor();
      parameters(model)[missing].mutable_grad() = at::Tensor();
      reference.step();
      muon.step();
    }
    expect_same_bits(model, plain);
  });
}

/// A sharded model, with a Muon that has no state yet.
struct Trial {
  Matrices model;
  std::unique_ptr<Muon> muon;

  explicit Trial(const Group& world) {
    shard(model, {});
    muon = std::make_unique<Muon>(parameters(model), 0.02);
    set_sharded_gradients(model, world, 0);
  }

  /// The error of a step, after which everything is as it was.
  std::string error() {
    std::vector<at::Tensor> before;
    for (const at::Tensor& param : parameters(model)) {
      before.push_back(param.detach().clone());
    }
    auto text = error_of([&] { muon->step(); });
    const auto after = parameters(model);
    for (size_t i = 0; i < after.size(); ++i) {
      EXPECT_TRUE(at::equal(after[i], before[i]));
      EXPECT_EQ(muon->find_state(after[i]), nullptr);
    }
    return text;
  }
};

TEST(MuonShardedErrorsTest, AGradientOnSomeRanksIsAnErrorOnAll) {
  on_ranks(2, [](const Group& world) {
    Trial run(world);
    if (world.rank() == 1) {
      parameters(run.model)[2].mutable_grad() = at::Tensor();
    }
    EXPECT_THAT(
        run.error(),
        AllOf(
            HasSubstr("Muon::step"),
            HasSubstr("\"pair1.first\" of shape [7, 7], a gradient"),
            HasSubstr("\"pair1.first\" of shape [7, 7], no gradient")));
    // The group is usable after it.
    set_sharded_gradients(run.model, world, 0);
    run.muon->step();
  });
}

TEST(MuonShardedErrorsTest, OptionsThatDifferAreAnErrorOnAllRanks) {
  on_ranks(2, [](const Group& world) {
    Trial run(world);
    if (world.rank() == 1) {
      run.muon->param_groups()[0].options().set_lr(0.5);
    }
    EXPECT_THAT(run.error(), AllOf(HasSubstr("lr 0.02"), HasSubstr("lr 0.5")));
    run.muon->param_groups()[0].options().set_lr(0.02);
    run.muon->set_batch_bytes(100 + world.rank());
    EXPECT_THAT(run.error(), HasSubstr("batch_bytes 101"));
  });
}

TEST(MuonShardedErrorsTest, AWrongGradientOfOneRankIsAnErrorOnAll) {
  on_ranks(2, [](const Group& world) {
    Trial run(world);
    if (world.rank() == 1) {
      at::Tensor leaf = parameters(run.model)[7];
      leaf.mutable_grad() = torch::zeros(leaf.sizes(), at::kDouble);
    }
    EXPECT_THAT(run.error(), HasSubstr("its gradient has dtype Double"));
  });
}

TEST(MuonShardedErrorsTest, AGradientOfAnotherShapeOnOneRankIsAnErrorOnAll) {
  on_ranks(2, [](const Group& world) {
    Trial run(world);
    if (world.rank() == 1) {
      at::Tensor leaf = parameters(run.model)[7];
      leaf.mutable_grad() = torch::zeros({1}, leaf.options());
    }
    EXPECT_THAT(run.error(), HasSubstr("but its gradient has shape [1]"));
  });
}

TEST(MuonShardedErrorsTest, AStepWhileParametersAreSummonedChangesNothing) {
  on_ranks(2, [](const Group& world) {
    Trial trial(world);
    const auto shards = parameters(trial.model);
    {
      const auto guard = summon_full_params(trial.model);
      EXPECT_THAT(
          error_of([&] { trial.muon->step(); }),
          HasSubstr("inside summon_full_params"));
    }
    for (const at::Tensor& param : shards) {
      EXPECT_EQ(trial.muon->find_state(param), nullptr);
    }
    trial.muon->step();
  });
}

TEST(MuonShardedErrorsTest, RejectsShardsOfOthersThanMatrices) {
  on_ranks(2, [](const Group&) {
    Matrices model(/*has_vectors=*/true);
    shard(model, {});
    EXPECT_THAT(
        error_of([&] { Muon(parameters(model)); }),
        AllOf(
            HasSubstr("[Muon] parameter \"pair0.vector\""),
            HasSubstr("shape is [5]")));
    FSDP flat(Matrices(), FSDPOptions().use_orig_params(false));
    EXPECT_THAT(
        error_of([&] { Muon(parameters(flat)); }),
        HasSubstr("use_orig_params(true)"));
  });
}

/// Learns a fixed map; the last layer is AdamW's. In double: averages of
/// gradients differ in their last bits between numbers of ranks, and where that
/// bit is one of float32 it can move a rounding to bfloat16 in Muon's
/// iteration.
torch::nn::Sequential make_network() {
  torch::manual_seed(4);
  torch::nn::Sequential network(
      torch::nn::Linear(10, 24),
      torch::nn::Tanh(),
      torch::nn::Linear(24, 17),
      torch::nn::Tanh(),
      torch::nn::Linear(17, 3));
  network->to(torch::kDouble);
  return network;
}

bool is_hidden(const std::string& name, at::IntArrayRef /*sizes*/) {
  return name != "4.weight";
}

/// Rows for all ranks; the same in each step.
at::Tensor inputs_for(int num_ranks) {
  torch::manual_seed(5);
  return torch::randn({4L * num_ranks, 10}, torch::kDouble);
}

at::Tensor loss_of(torch::nn::Sequential& model, const at::Tensor& x) {
  return (model->forward(x) - x.narrow(1, 0, 3).sin()).square().mean();
}

TEST(MuonTrainingTest, LossesMatchASingleProcess) {
  constexpr int kTrainSteps = 12;
  for (const int num_ranks : {2, 4}) {
    on_ranks(num_ranks, [&](const Group& world) {
      const auto x = inputs_for(num_ranks);
      auto plain = make_network();
      auto reference =
          muon_with_adamw(plain, 0.02, AdamWOptions(0.01), is_hidden);
      auto model = make_network();
      for (auto& layer : *model) {
        fully_shard(layer);
      }
      fully_shard(model);
      auto optimizers =
          muon_with_adamw(model, 0.02, AdamWOptions(0.01), is_hidden);
      double first = 0;
      double last = 0;
      for (int step = 0; step < kTrainSteps; ++step) {
        auto wanted = loss_of(plain, x);
        wanted.backward();
        reference.step();
        reference.zero_grad();

        auto found = loss_of(model, x.narrow(0, 4L * world.rank(), 4));
        found.backward();
        optimizers.step();
        optimizers.zero_grad();
        auto mean = found.detach().clone();
        world.all_reduce(mean, ReduceOp::Avg);
        last = mean.item<double>();
        first = step == 0 ? last : first;
        EXPECT_NEAR(last, wanted.item<double>(), 1e-12 * first) << step;
      }
      EXPECT_LT(last, first / 2);
    });
  }
}

} // namespace
} // namespace tessera::optim
