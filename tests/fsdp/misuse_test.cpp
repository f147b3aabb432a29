// Programs that would silently train on wrong numbers, and the errors they get.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/error.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/summon.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/optim_state.h>
#include <tessera/transfer/state_dict_type.h>

#include "fsdp/models.h"
#include "fsdp/training.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// The values of a model's shards, to compare later.
std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.detach().clone());
  }
  return copies;
}

void expect_unchanged(
    const std::vector<at::Tensor>& now,
    const std::vector<at::Tensor>& before) {
  for (size_t i = 0; i < now.size(); ++i) {
    EXPECT_TRUE(torch::equal(now[i].detach(), before[i])) << i;
  }
}

/// The gradients that the model's shards have.
std::vector<at::Tensor> gradients_of(torch::nn::Module& model) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& leaf : parameters(model)) {
    if (leaf.grad().defined()) {
      gradients.push_back(leaf.grad());
    }
  }
  return gradients;
}

TEST(MisuseTest, OverlapBytesMustBeAlikeOnAllRanksAndNotNegative) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    const auto shard = [&](int64_t overlap_bytes) {
      return error_of([&] {
        fully_shard(model, FullyShardOptions().overlap_bytes(overlap_bytes));
      });
    };
    EXPECT_THAT(shard(-1), HasSubstr("overlap_bytes is -1"));
    EXPECT_THAT(shard(world.rank()), HasSubstr("overlap_bytes"));
    EXPECT_EQ(shard(1), "nothing was thrown");
  });
}

TEST(MisuseTest, AnOptimizerMadeBeforeShardingIsRefusedAtItsFirstStep) {
  on_ranks(2, [](const Group& world) {
    for (const bool has_plain_group : {false, true}) {
      auto model = make_stack();
      const at::Tensor extra =
          torch::ones({2}, at::kDouble).set_requires_grad(true);
      std::vector<torch::optim::OptimizerParamGroup> groups;
      if (has_plain_group) {
        groups.emplace_back(std::vector<at::Tensor>{extra});
      }
      groups.emplace_back(model->parameters());
      optim::AdamW ours(groups, 1e-2);
      auto libtorch = make_adamw(model->parameters());
      shard_blocks(model);
      const auto before = copies_of(parameters(*model));
      loss_of(model, tokens(world.rank(), 0)).backward();
      extra.mutable_grad() = torch::ones_like(extra);
      EXPECT_THAT(
          error_of([&] { ours.step(); }),
          AllOf(
              HasSubstr("[AdamW]"),
              HasSubstr("after sharding"),
              HasSubstr(
                  "optim::AdamW optimizer(tessera::parameters(model), ...)")));
      EXPECT_THAT(
          error_of([&] { libtorch.step(); }),
          AllOf(
              HasSubstr("parameter \"head\""),
              HasSubstr("made after fully_shard"),
              HasSubstr("tessera::parameters(model)")));
      expect_unchanged(parameters(*model), before);
      EXPECT_TRUE(torch::equal(extra, torch::ones_like(extra)));
    }
  });
}

TEST(MisuseTest, OptimizersOfOursBuiltOnShardedParametersSayWhatToWrite) {
  on_ranks(2, [](const Group&) {
    auto model = make_stack();
    model->head.set_requires_grad(false); // a leaf, but sharded all the same
    shard_blocks(model);
    EXPECT_THAT(
        error_of([&] { optim::SGD(model->parameters(), 0.1); }),
        HasSubstr("optim::SGD optimizer(tessera::parameters(model), ...)"));
    EXPECT_THAT(
        error_of([&] { optim::SGD({model->head}, 0.1); }),
        HasSubstr("parameter 0 of param group 0 is sharded"));
    // Inside a summon they are the module's own parameters.
    const auto guard = summon_full_params(*model);
    EXPECT_NO_THROW(optim::SGD(parameters(*model), 0.1));
  });
}

TEST(MisuseTest, ZeroGradOfAShardedModuleClearsTheShards) {
  on_ranks(2, [](const Group& world) {
    for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      for (const bool to_none : {true, false}) {
        auto model = make_stack();
        shard_blocks(model, FullyShardOptions().layout(layout));
        auto plain = make_stack();
        auto ours = make_adamw(parameters(*model));
        auto theirs = make_adamw(plain->parameters());
        for (int step = 0; step < 3; ++step) {
          loss_of(model, tokens(world.rank(), step)).backward();
          ours.step();
          model->zero_grad(to_none);
          loss_of(plain, all_tokens(world.size(), step)).backward();
          theirs.step();
          plain->zero_grad(to_none);
          for (const at::Tensor& leaf : parameters(*model)) {
            EXPECT_EQ(leaf.grad().defined(), !to_none);
            if (leaf.grad().defined()) {
              EXPECT_EQ(leaf.grad().abs().sum().item<double>(), 0);
            }
          }
        }
        expect_same_parameters(model, plain, 1e-9);
      }
    }
  });
}

TEST(MisuseTest, ZeroGradOfAFlatParameterClearsIt) {
  on_ranks(2, [](const Group& world) {
    auto module = make_stack();
    const FSDP model(module);
    loss_of(module, tokens(world.rank(), 0)).backward();
    const at::Tensor flat = parameters(*model).front();
    ASSERT_TRUE(flat.grad().defined());
    module->zero_grad();
    EXPECT_FALSE(flat.grad().defined());
  });
}

TEST(MisuseTest, ClippingWithLibTorchsFunctionIsRefused) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    loss_of(model, tokens(world.rank(), 0)).backward();
    const auto gradients = gradients_of(*model);
    const auto before = copies_of(gradients);
    for (const double norm_type :
         {2.0, std::numeric_limits<double>::infinity(), 0.0}) {
      EXPECT_THAT(
          error_of([&] {
            torch::nn::utils::clip_grad_norm_(
                model->parameters(), 1e-3, norm_type);
          }),
          AllOf(
              HasSubstr("tessera::clip_grad_norm_(model, max_norm)"),
              HasSubstr("parameter \"head\"")));
    }
    EXPECT_THAT(
        error_of([&] {
          torch::nn::utils::clip_grad_value_(model->parameters(), 1e-3);
        }),
        HasSubstr("gradient of a sharded parameter"));
    // The norm of one rank's shards is refused, too. LibTorch itself refuses
    // the largest element of a gradient that is empty on this rank.
    for (const double norm_type :
         {2.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_THAT(
          error_of([&] {
            torch::nn::utils::clip_grad_norm_(
                parameters(*model), 1e-3, norm_type);
          }),
          AnyOf(
              HasSubstr("tessera::clip_grad_norm_(model, max_norm)"),
              HasSubstr("max(): Expected reduction dim")));
    }
    expect_unchanged(gradients, before);

    // Clipping by hand is possible, and clipping each element by itself.
    const double norm = clip_grad_norm_(*model, 1e9).item<double>();
    auto sum = torch::zeros({1}, at::kDouble);
    for (const at::Tensor& gradient : gradients) {
      sum += gradient.norm().square();
    }
    world.all_reduce(sum);
    EXPECT_NEAR(sum.sqrt().item<double>(), norm, 1e-9);
    for (const at::Tensor& gradient : gradients) {
      gradient.mul_(1e-3 / sum.sqrt().squeeze());
    }
    EXPECT_NEAR(clip_grad_norm_(*model, 1e9).item<double>(), 1e-3, 1e-6);
    torch::nn::utils::clip_grad_value_(parameters(*model), 1e-6);
    EXPECT_LE(
        clip_grad_norm_(*model, 1e9, std::numeric_limits<double>::infinity())
            .item<double>(),
        1e-6);
  });
}

TEST(MisuseTest, RetainedAndSummonedGradientsAreTheFacesOwn) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    model->head.retain_grad();
    loss_of(model, tokens(world.rank(), 0)).backward();
    ASSERT_TRUE(model->head.grad().defined());
    EXPECT_EQ(model->head.grad().sizes(), model->head.sizes());
    const auto guard =
        summon_full_params(*model, SummonOptions().with_grads(true));
    EXPECT_EQ(
        model->embed->weight.grad().sizes(), model->embed->weight.sizes());
  });
}

/// Blocks are units, and nobody thought of the rest.
Stack forget_the_root() {
  auto model = make_stack();
  for (const auto& block : *model->blocks) {
    fully_shard(*block);
  }
  return model;
}

TEST(MisuseTest, ARootThatWasNeverShardedIsFoundWhenItDiverges) {
  on_ranks(2, [](const Group& world) {
    for (const bool by_libtorch : {true, false}) {
      auto model = forget_the_root();
      auto libtorch = make_adamw(parameters(*model));
      optim::AdamW ours(parameters(*model), 1e-2);
      std::string error;
      int steps = 0;
      try {
        for (; steps < 5; ++steps) {
          loss_of(model, tokens(world.rank(), steps)).backward();
          by_libtorch ? libtorch.step() : ours.step();
          model->zero_grad();
        }
      } catch (const DisagreementError& thrown) {
        error = thrown.what();
      }
      EXPECT_EQ(steps, 1); // before the second step
      EXPECT_THAT(
          error,
          AllOf(
              HasSubstr("embed.weight"), // the first by name of two
              HasSubstr("fully_shard on the whole model"),
              HasSubstr("ignored_params")));
    }
  });
}

/// Two models of one class do not hide each other's parameters.
TEST(MisuseTest, RootsOfTwoModelsThatWereNeverShardedAreBothFound) {
  on_ranks(2, [](const Group& world) {
    auto first = forget_the_root();
    auto second = forget_the_root();
    auto optimizer = make_adamw(parameters(*first));
    const auto never_stepped = parameters(*second);
    EXPECT_THAT(
        error_of([&] {
          for (int step = 0; step < 3; ++step) {
            loss_of(first, tokens(world.rank(), step)).backward();
            optimizer.step();
            first->zero_grad();
          }
        }),
        HasSubstr("embed.weight"));
  });
}

TEST(MisuseTest, WhatIsNotShardedMayBeTrainedByItsUser) {
  on_ranks(2, [](const Group& world) {
    const auto train = [&](Stack& model, bool averages) {
      auto optimizer = make_adamw(parameters(*model));
      for (int step = 0; step < 3; ++step) {
        loss_of(model, tokens(world.rank(), step)).backward();
        if (averages) {
          world.all_reduce(model->head.grad(), ReduceOp::Avg);
          world.all_reduce(model->embed->weight.grad(), ReduceOp::Avg);
        }
        optimizer.step();
        model->zero_grad();
      }
    };
    auto averaged = forget_the_root();
    EXPECT_NO_THROW(train(averaged, true));
    auto ignored = forget_the_root();
    fully_shard(
        *ignored,
        FullyShardOptions().ignored_params(
            {ignored->head, ignored->embed->weight}));
    EXPECT_NO_THROW(train(ignored, false));
    // One rank may look at the parameters alone.
    auto looked_at = forget_the_root();
    if (world.rank() == 0) {
      EXPECT_FALSE(named_parameters(*looked_at).empty());
    }
    loss_of(looked_at, tokens(world.rank(), 0)).backward();
    // A root that is sharded later has nothing to compare.
    auto late = forget_the_root();
    EXPECT_FALSE(named_parameters(*late).empty());
    fully_shard(*late);
    EXPECT_NO_THROW(train(late, false));
  });
}

TEST(MisuseTest, ShardingUnderALiveDdpIsRefused) {
  on_ranks(2, [](const Group&) {
    auto model = make_stack();
    {
      const DistributedDataParallel ddp(model);
      EXPECT_THAT(
          error_of([&] { fully_shard(*model); }),
          AllOf(
              HasSubstr("parameter \"head\""),
              HasSubstr("DistributedDataParallel")));
      EXPECT_THAT(
          error_of([&] { fully_shard(*model->blocks[0]); }),
          HasSubstr("parameter \"norm.weight\""));
    }
    EXPECT_NO_THROW(fully_shard(*model));
  });
}

TEST(MisuseTest, ClippingNeverScalesShardsByDifferentFactors) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    fully_shard(*model, FullyShardOptions().ignored_params({model->head}));
    loss_of(model, tokens(world.rank(), 0)).backward();
    const auto gradients = gradients_of(*model);
    const auto before = copies_of(gradients);
    EXPECT_THAT(
        error_of([&] { clip_grad_norm_(*model, 1e-3); }),
        AllOf(
            HasSubstr("parameter \"head\""),
            HasSubstr("gradient differs between the ranks")));
    expect_unchanged(gradients, before);

    // Averaged, as the message says, they are those of the whole batch.
    world.all_reduce(model->head.grad(), ReduceOp::Avg);
    auto plain = make_stack();
    loss_of(plain, all_tokens(world.size(), 0)).backward();
    const double expected =
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e-3);
    EXPECT_NEAR(clip_grad_norm_(*model, 1e-3).item<double>(), expected, 1e-9);
    EXPECT_TRUE(torch::allclose(model->head.grad(), plain->head.grad()));
    // Also on a rank that has none.
    if (world.rank() == 1) {
      model->head.mutable_grad().reset();
    }
    EXPECT_THAT(
        error_of([&] { clip_grad_norm_(*model, 1e-3); }),
        HasSubstr("none on rank 1"));
  });
}

TEST(MisuseTest, HooksOnShardsAreCalledWithTheAverage) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    auto plain = make_stack();
    int calls = 0;
    for (const at::Tensor& leaf : parameters(*model)) {
      leaf.register_hook([&](const at::Tensor& gradient) {
        ++calls;
        return gradient * 2;
      });
    }
    for (int step = 0; step < 2; ++step) { // they add up
      loss_of(model, tokens(world.rank(), step)).backward();
      (2 * loss_of(plain, all_tokens(world.size(), step))).backward();
    }
    EXPECT_GT(calls, 0);
    const auto guard =
        summon_full_params(*model, SummonOptions().with_grads(true));
    const auto theirs = plain->named_parameters();
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(torch::allclose(
          item.value().grad(), theirs[item.key()].grad(), 1e-9, 1e-9))
          << item.key();
    }
  });
}

TEST(MisuseTest, AHookOnAShardThatThrowsOnOneRankThrowsOnAll) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    bool throws = world.rank() == 1;
    for (const at::Tensor& leaf : parameters(*model)) {
      leaf.register_hook([&](const at::Tensor& gradient) {
        if (throws) {
          throw std::runtime_error("too large");
        }
        return gradient;
      });
    }
    EXPECT_THAT(
        error_of([&] { loss_of(model, tokens(world.rank(), 0)).backward(); }),
        HasSubstr(
            world.rank() == 1 ? "too large" : "on a shard threw on rank 1"));
    throws = false;
    EXPECT_NO_THROW(loss_of(model, tokens(world.rank(), 1)).backward());
  });
}

TEST(MisuseTest, LbfgsIsRefusedOnShards) {
  on_ranks(2, [](const Group& world) {
    for (const bool searches : {false, true}) {
      auto model = make_stack();
      shard_blocks(model, FullyShardOptions().layout(ShardLayout::Dim0));
      auto options = torch::optim::LBFGSOptions(0.1).max_iter(3);
      if (searches) {
        options.line_search_fn("strong_wolfe");
      }
      torch::optim::LBFGS optimizer(parameters(*model), options);
      const auto before = copies_of(parameters(*model));
      EXPECT_THAT(
          error_of([&] {
            optimizer.step([&] {
              optimizer.zero_grad();
              auto loss = loss_of(model, tokens(world.rank(), 0));
              loss.backward();
              return loss;
            });
          }),
          HasSubstr("LBFGS needs dot products over all parameters"));
      expect_unchanged(parameters(*model), before);
    }
    // Others may look at a shard's shape.
    auto model = make_stack();
    shard_blocks(model);
    const at::Tensor leaf = parameters(*model).front();
    EXPECT_NO_THROW(torch::zeros({leaf.numel()}).view_as(leaf));
  });
}

TEST(MisuseTest, FullValuesThatDifferBetweenRanksAreNotTaken) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    set_state_dict_type(*model, StateDictType::FullStateDict);
    StateDict dict = state_dict(*model);
    const auto before = copies_of(parameters(*model));
    EXPECT_NO_THROW(load_state_dict(*model, dict));
    const at::Tensor other = dict.at("head").tensor().clone();
    other[0][0].add_(world.rank());
    dict.set("head", other);
    EXPECT_THAT(
        error_of([&] { load_state_dict(*model, dict); }),
        AllOf(
            HasSubstr("rank 0: head: full, with the digest"),
            HasSubstr("rank 1: head: full, with the digest")));
    expect_unchanged(parameters(*model), before);
  });
}

TEST(MisuseTest, FullOptimizerValuesThatDifferBetweenRanksAreNotTaken) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    set_state_dict_type(*model, StateDictType::FullStateDict);
    optim::AdamW optimizer(parameters(*model), 1e-2);
    loss_of(model, tokens(world.rank(), 0)).backward();
    optimizer.step();
    StateDict dict = optim_state_dict(*model, optimizer);
    EXPECT_NO_THROW(optim_state_dict_to_load(*model, optimizer, dict));
    at::Tensor moment =
        dict.at("state").dict().at("head").dict().at("exp_avg").tensor();
    moment[0][0].add_(world.rank());
    EXPECT_THAT(
        error_of([&] { optim_state_dict_to_load(*model, optimizer, dict); }),
        AllOf(HasSubstr("head:"), HasSubstr("with the digest")));
  });
}

/// shard_full_optim_state_dict() is not collective: the next backward tells.
TEST(MisuseTest, FullOptimizerValuesThatDifferShowInTheNextBackward) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    const FSDP handle(model, FSDPOptions().use_orig_params(true));
    optim::AdamW optimizer(parameters(*model), 1e-2);
    loss_of(model, tokens(world.rank(), 0)).backward();
    optimizer.step();
    const StateDict full = full_optim_state_dict(
        *model, optimizer, FullOptimStateOptions().rank0_only(false));
    shard_full_optim_state_dict(full, *model);
    EXPECT_NO_THROW(loss_of(model, tokens(world.rank(), 1)).backward());
    StateDict other = full.clone();
    other.at("state")
        .dict()
        .at("head")
        .dict()
        .at("exp_avg")
        .tensor()[0][0]
        .add_(world.rank());
    shard_full_optim_state_dict(other, *model);
    EXPECT_THAT(
        error_of([&] { loss_of(model, tokens(world.rank(), 2)).backward(); }),
        HasSubstr("[shard_full_optim_state_dict]"));
  });
}

} // namespace
} // namespace tessera
