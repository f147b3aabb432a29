#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/error.h>
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kTolerance = 1e-9;
/// Small enough for every parameter to have a bucket of its own.
constexpr double kTinyMb = 1e-6;

/// kSteps on this rank's part of the batch.
void train(
    DistributedDataParallel<StackImpl>& ddp,
    int rank,
    bool set_to_none = true) {
  auto optimizer = make_adamw(parameters(*ddp)); // tied ones once
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad(set_to_none);
    Stack model(ddp.module());
    loss_of(model, tokens(rank, step)).backward();
    optimizer.step();
  }
}

void expect_matches_single_process(
    const Group& world,
    const DDPOptions& options,
    bool tied = false,
    bool set_to_none = true) {
  Stack model = make_stack(tied);
  {
    DistributedDataParallel ddp(model, options);
    train(ddp, world.rank(), set_to_none);
  }
  Reference reference = train_plain(world.size(), tied);
  expect_same_parameters(model, reference.model, kTolerance);
}

TEST(DdpTest, MatchesSingleProcess) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const Group& world) {
      expect_matches_single_process(world, {});
    });
  }
}

TEST(DdpTest, WithManyBucketsMatchesSingleProcess) {
  on_ranks(2, [](const Group& world) {
    expect_matches_single_process(
        world, DDPOptions().bucket_cap_mb(kTinyMb).first_bucket_mb(kTinyMb));
  });
}

TEST(DdpTest, WithGradientsInBucketsMatchesSingleProcess) {
  on_ranks(2, [](const Group& world) {
    const auto options = DDPOptions().gradient_as_bucket_view(true);
    for (const bool set_to_none : {false, true}) {
      expect_matches_single_process(world, options, false, set_to_none);
      expect_matches_single_process(
          world,
          DDPOptions(options).bucket_cap_mb(kTinyMb).first_bucket_mb(kTinyMb),
          false,
          set_to_none);
    }
  });
}

TEST(DdpTest, WithTiedWeightsMatchesSingleProcess) {
  on_ranks(2, [](const Group& world) {
    expect_matches_single_process(world, {}, true);
  });
}

TEST(DdpTest, OverGlooMatchesSingleProcess) {
  on_ranks({.size = 2, .backend = "gloo"}, [](const Group& world) {
    expect_matches_single_process(
        world, DDPOptions().bucket_cap_mb(1e-3).first_bucket_mb(kTinyMb));
  });
}

TEST(DdpTest, GradientsAreViewsOfTheBuckets) {
  on_ranks(2, [](const Group& world) {
    Stack model = make_stack();
    DistributedDataParallel ddp(
        model, DDPOptions().gradient_as_bucket_view(true));
    for (int step = 0; step < 2; ++step) {
      loss_of(model, tokens(world.rank(), step)).backward();
      const auto params = model->parameters();
      for (const at::Tensor& param : params) {
        EXPECT_TRUE(param.grad().is_alias_of(params[0].grad()));
      }
      model->zero_grad(/*set_to_none=*/false);
    }
  });
}

TEST(DdpTest, EveryRankStartsWithRankZerosModel) {
  on_ranks(3, [](const Group& world) {
    torch::manual_seed(world.rank());
    torch::nn::Sequential model(
        torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
    model->buffers()[0].fill_(world.rank() + 1);
    DistributedDataParallel ddp(model);
    torch::manual_seed(0);
    torch::nn::Linear expected(4, 3);
    EXPECT_TRUE(torch::equal(model->parameters()[0], expected->weight));
    EXPECT_EQ(model->buffers()[0][0].item<float>(), 1);
  });
}

TEST(DdpTest, BuffersAreRankZerosBeforeEachForward) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Sequential model(
        torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
    DistributedDataParallel ddp(model);
    const at::Tensor mean = model->buffers()[0];
    model->eval();
    mean.fill_(world.rank() + 5);
    ddp(torch::randn({2, 4}));
    EXPECT_EQ(mean[0].item<float>(), 5);
    {
      // Not while gradients only add up.
      const auto no_sync = ddp.no_sync();
      ddp(torch::randn({2, 4}));
      mean.fill_(world.rank() + 7);
      ddp(torch::randn({2, 4}));
      EXPECT_EQ(mean[0].item<float>(), world.rank() + 7);
    }
  });
}

TEST(DdpTest, NoSyncAddsUpAndTheNextBackwardReducesTheSum) {
  on_ranks(2, [](const Group& world) {
    for (const bool bucket_view : {false, true}) {
      Stack model = make_stack();
      DistributedDataParallel ddp(
          model, DDPOptions().gradient_as_bucket_view(bucket_view));
      for (int round = 0; round < 2; ++round) {
        model->zero_grad();
        {
          const auto no_sync = ddp.no_sync();
          loss_of(model, tokens(world.rank(), 0)).backward();
        }
        loss_of(model, tokens(world.rank(), 1)).backward();
        Stack plain = make_stack();
        loss_of(plain, all_tokens(2, 0)).backward();
        loss_of(plain, all_tokens(2, 1)).backward();
        const auto params = model->parameters();
        const auto expected = plain->parameters();
        for (size_t i = 0; i < params.size(); ++i) {
          EXPECT_TRUE(torch::allclose(
              params[i].grad(), expected[i].grad(), 0, kTolerance));
        }
      }
    }
  });
}

/// Uses those of its three layers that it is told to use.
struct PartsImpl : torch::nn::Module {
  PartsImpl() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          register_module("part" + std::to_string(i), torch::nn::Linear(2, 2)));
    }
  }
  at::Tensor forward(const std::vector<int>& used) {
    at::Tensor x = torch::ones({1, 2});
    for (const int i : used) {
      x = layers[i]->forward(x);
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Parts);

TEST(DdpTest, RejectsMissingGradientsOnEveryRankByName) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    DistributedDataParallel ddp(model);
    const std::string error = error_of([&] {
      ddp(world.rank() == 1 ? std::vector{0, 2} : std::vector{0, 1, 2})
          .sum()
          .backward();
    });
    EXPECT_THAT(
        error,
        AllOf(
            HasSubstr("rank 1"),
            HasSubstr("2 of 6 parameters got no gradient"),
            HasSubstr("\"part1.weight\", \"part1.bias\""),
            HasSubstr("find_unused_parameters")));
    // The next backward is as if nothing had happened.
    model->zero_grad();
    ddp(std::vector{0, 1, 2}).sum().backward();
    EXPECT_TRUE(model->layers[1]->weight.grad().defined());
  });
}

TEST(DdpTest, UnusedParametersKeepTheirGradientAndPartlyUsedOnesGetTheAverage) {
  on_ranks(2, [](const Group& world) {
    for (const bool bucket_view : {false, true}) {
      torch::manual_seed(0);
      Parts model;
      DistributedDataParallel ddp(
          model,
          DDPOptions().find_unused_parameters(true).gradient_as_bucket_view(
              bucket_view));
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp(world.rank() == 1 ? std::vector{0} : std::vector{0, 1})
            .sum()
            .backward();
        EXPECT_FALSE(model->layers[2]->weight.grad().defined());
        // Rank 0's only: half of it is the average.
        EXPECT_TRUE(
            torch::equal(model->layers[1]->bias.grad(), torch::full({2}, 0.5)));
      }
    }
  });
}

TEST(DdpTest, WhatWasUsedUnderNoSyncAloneIsReducedToo) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    DistributedDataParallel ddp(
        model, DDPOptions().find_unused_parameters(true));
    for (int round = 0; round < 2; ++round) {
      model->zero_grad();
      {
        const auto no_sync = ddp.no_sync();
        (ddp(std::vector{1}).sum() * world.rank()).backward();
      }
      ddp(std::vector{0}).sum().backward();
      EXPECT_TRUE(
          torch::equal(model->layers[1]->bias.grad(), torch::full({2}, 0.5f)));
    }
  });
}

TEST(DdpTest, RejectsModelsThatDiffer) {
  on_ranks(2, [](const Group& world) {
    torch::nn::Linear model(2 + world.rank(), 2);
    EXPECT_THROW(DistributedDataParallel ddp(model), DisagreementError);
    torch::nn::Linear same(2, 2);
    same->bias.requires_grad_(world.rank() == 0);
    EXPECT_THAT(
        error_of([&] { DistributedDataParallel ddp(same); }),
        HasSubstr("frozen"));
  });
}

TEST(DdpTest, RejectsNothingToTrain) {
  on_ranks(2, [](const Group&) {
    torch::nn::Linear frozen(2, 2);
    for (const at::Tensor& param : frozen->parameters()) {
      param.requires_grad_(false);
    }
    EXPECT_THROW(DistributedDataParallel ddp(frozen), c10::ValueError);
    torch::nn::ReLU empty;
    EXPECT_THROW(DistributedDataParallel ddp(empty), c10::ValueError);
  });
}

TEST(DdpTest, WithoutTheHandleGradientsAreLocalAgain) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    { DistributedDataParallel ddp(model); }
    if (world.rank() == 0) {
      model->forward({0}).sum().backward();
      EXPECT_TRUE(model->layers[0]->weight.grad().defined());
    }
  });
}

TEST(DdpTest, GradOfParametersIsLocal) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    DistributedDataParallel ddp(model);
    const auto gradient = torch::autograd::grad(
        {ddp(std::vector{0}).sum() * (world.rank() + 1)},
        {model->layers[0]->bias})[0];
    EXPECT_TRUE(torch::equal(gradient, torch::full({2}, world.rank() + 1.f)));
  });
}

TEST(DdpTest, RecomputationMatchesSingleProcess) {
  on_ranks(2, [](const Group& world) {
    Stack model = make_stack();
    DistributedDataParallel ddp(model);
    at::Tensor x = model->embed(tokens(world.rank(), 0));
    for (const auto& block : *model->blocks) {
      x = recompute(
          [block](const at::Tensor& in) {
            return block->as<Block>()->forward(in);
          },
          x);
    }
    torch::linear(x, model->head).square().mean().backward();
    const auto recomputed = model->head.grad().clone();
    const auto up = model->blocks[0]->as<Block>()->up->weight.grad().clone();
    model->zero_grad();
    model->forward(tokens(world.rank(), 0)).square().mean().backward();
    EXPECT_TRUE(torch::equal(recomputed, model->head.grad()));
    EXPECT_TRUE(
        torch::equal(up, model->blocks[0]->as<Block>()->up->weight.grad()));
  });
}

/// The identity, whose backward throws.
struct Thrower : torch::autograd::Function<Thrower> {
  static at::Tensor forward(
      torch::autograd::AutogradContext*,
      const at::Tensor& x) {
    return x.clone();
  }
  static std::vector<at::Tensor> backward(
      torch::autograd::AutogradContext*,
      const std::vector<at::Tensor>&) {
    throw std::runtime_error("in backward");
  }
};

TEST(DdpTest, SurvivesAnExceptionInBackward) {
  on_ranks(2, [](const Group& world) {
    Stack model = make_stack();
    DistributedDataParallel ddp(
        model, DDPOptions().bucket_cap_mb(kTinyMb).first_bucket_mb(kTinyMb));
    const auto half = [&] {
      const at::Tensor x =
          Thrower::apply(model->embed(tokens(world.rank(), 0)));
      torch::linear(model->blocks[0]->as<Block>()->forward(x), model->head)
          .sum()
          .backward();
    };
    EXPECT_THAT(error_of(half), HasSubstr("in backward"));
    model->zero_grad();
    train(ddp, world.rank());
    Reference reference = train_plain(world.size());
    expect_same_parameters(model, reference.model, kTolerance);
  });
}

TEST(DdpHookTest, BuiltInHooksMatchTheAverage) {
  on_ranks(2, [](const Group& world) {
    const auto gradients_with = [&](CommHook hook) {
      Stack model = make_stack();
      model->to(at::kFloat);
      DistributedDataParallel ddp(model);
      if (hook) {
        ddp.register_comm_hook(std::move(hook));
      }
      model->forward(tokens(world.rank(), 0)).square().mean().backward();
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& param : model->parameters()) {
        gradients.push_back(param.grad().view({-1}));
      }
      return torch::cat(gradients);
    };
    const at::Tensor plain = gradients_with(nullptr);
    EXPECT_TRUE(torch::equal(plain, gradients_with(allreduce_hook(world))));
    EXPECT_TRUE(torch::allclose(
        plain, gradients_with(fp16_compress_hook(world)), 2e-3, 1e-5));
    EXPECT_TRUE(torch::allclose(
        plain, gradients_with(bf16_compress_hook(world)), 2e-2, 1e-4));
  });
}

TEST(DdpHookTest, AHookSeesBucketsInOrder) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    DistributedDataParallel ddp(
        model, DDPOptions().bucket_cap_mb(kTinyMb).first_bucket_mb(kTinyMb));
    std::vector<size_t> seen;
    ddp.register_comm_hook([&](GradBucket& bucket) -> CommFuture {
      seen.push_back(bucket.index());
      EXPECT_EQ(bucket.is_last(), bucket.index() == 5);
      EXPECT_EQ(bucket.parameters().size(), 1u);
      EXPECT_EQ(bucket.gradients()[0].sizes(), bucket.parameters()[0].sizes());
      return [buffer = bucket.buffer()] { return buffer + 1; };
    });
    ddp(std::vector{0, 1, 2}).sum().backward();
    EXPECT_THAT(seen, ElementsAre(0, 1, 2, 3, 4, 5));
    EXPECT_TRUE(
        torch::equal(model->layers[2]->bias.grad(), torch::full({2}, 2.f)));
    EXPECT_THROW(
        ddp.register_comm_hook(allreduce_hook(world)), c10::ValueError);
  });
}

TEST(DdpHookTest, WhatAHookThrowsComesOutOfBackward) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    DistributedDataParallel ddp(model);
    bool throws = true;
    ddp.register_comm_hook(
        [&, average = allreduce_hook(world)](GradBucket& bucket) {
          if (throws) {
            throw std::runtime_error("no network today");
          }
          return average(bucket);
        });
    EXPECT_THAT(
        error_of([&] {
          ddp(std::vector{0, 1, 2}).sum().backward();
        }),
        HasSubstr("no network today"));
    throws = false;
    model->zero_grad();
    ddp(std::vector{0, 1, 2}).sum().backward();
    EXPECT_TRUE(torch::equal(model->layers[2]->bias.grad(), torch::ones({2})));
  });
}

TEST(DdpHookTest, RejectsResultsThatFitNoBucket) {
  on_ranks(2, [](const Group&) {
    const auto error_with = [](CommFuture future) {
      Parts model;
      DistributedDataParallel ddp(model);
      ddp.register_comm_hook([&](GradBucket&) { return future; });
      return error_of([&] { ddp(std::vector{0, 1, 2}).sum().backward(); });
    };
    EXPECT_THAT(error_with(nullptr), HasSubstr("returned nothing to wait for"));
    EXPECT_THAT(
        error_with([] { return at::Tensor(); }),
        HasSubstr("returned an undefined tensor"));
    EXPECT_THAT(
        error_with([] { return torch::ones({3}); }),
        HasSubstr("returned 3 elements for bucket 0 of 18 elements"));
    Parts model;
    DistributedDataParallel ddp(model);
    EXPECT_THROW(ddp.register_comm_hook(nullptr), c10::ValueError);
  });
}

/// The other ranks wait for its part of the reduction. No error here may come
/// from a timeout, which is that of the test.
TEST(DdpHookTest, AHookThatThrowsOnOneRankIsAnErrorOnAll) {
  enum class When { AtOnce, AfterTheFirstBucket, InItsFuture };
  for (const char* backend : {"auto", "gloo"}) {
    on_ranks({.size = 3, .backend = backend}, [](const Group& world) {
      for (const When when :
           {When::AtOnce, When::AfterTheFirstBucket, When::InItsFuture}) {
        const Group group = world.split(0).value(); // dead afterwards
        Parts model;
        DistributedDataParallel ddp(
            model,
            DDPOptions()
                .process_group(group)
                .bucket_cap_mb(kTinyMb)
                .first_bucket_mb(kTinyMb));
        ddp.register_comm_hook(
            [&, average = allreduce_hook(group)](GradBucket& bucket) {
              const bool is_due = world.rank() == 1 &&
                  bucket.index() == (when == When::AtOnce ? 0u : 1u);
              if (is_due && when == When::InItsFuture) {
                return CommFuture([inner = average(bucket)]() -> at::Tensor {
                  inner();
                  throw std::runtime_error("no network today");
                });
              }
              if (is_due) {
                throw std::runtime_error("no network today");
              }
              return average(bucket);
            });
        const std::string error = error_of([&] {
          ddp(std::vector{0, 1, 2}).sum().backward();
        });
        EXPECT_THAT(error, HasSubstr("no network today"));
        if (world.rank() != 1) {
          EXPECT_THAT(error, HasSubstr("rank 1 failed"));
        }
        world.barrier(); // the others of its groups live
      }
    });
  }
}

TEST(DdpTest, ABackwardThatReachesNoParameterOnOneRankIsAnErrorOnAll) {
  for (const char* backend : {"auto", "gloo"}) {
    on_ranks({.size = 3, .backend = backend}, [](const Group& world) {
      Parts model;
      DistributedDataParallel ddp(model);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      int steps = 0;
      std::string error;
      try {
        for (; steps < 6; ++steps) {
          auto output = ddp(std::vector{0, 1, 2});
          if (steps == 2 && world.rank() == 1) {
            output = output.detach().set_requires_grad(true);
          }
          output.sum().backward();
          optimizer.step();
        }
      } catch (const DisagreementError& thrown) {
        error = thrown.what();
      }
      // The rank that reduced nothing is one step ahead when they meet.
      EXPECT_EQ(steps, world.rank() == 1 ? 3 : 2);
      EXPECT_THAT(
          error,
          AllOf(
              HasSubstr("ranks 0, 2: 1 forward through the handle"),
              HasSubstr("rank 1: 2 forwards"),
              HasSubstr("reached no parameter")));
    });
  }
}

TEST(DdpTest, ForwardsThatNeedNoReductionAreNotCounted) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    DistributedDataParallel ddp(model);
    for (int step = 0; step < 2; ++step) {
      ddp(std::vector{0, 1, 2}); // on all ranks alike, and never backward
      if (world.rank() == 0) {
        model->eval();
        ddp(std::vector{0, 1, 2});
        model->train();
        const torch::NoGradGuard no_grad;
        ddp(std::vector{0, 1, 2});
      }
      if (world.rank() == 1) {
        const auto held_back = ddp.no_sync();
        ddp(std::vector{0, 1, 2});
      }
      EXPECT_NO_THROW(ddp(std::vector{0, 1, 2}).sum().backward());
    }
  });
}

TEST(DdpTest, AParameterThatNobodyAveragesIsAnErrorOnAll) {
  on_ranks(2, [](const Group& world) {
    { // thawed
      Stack model = make_stack();
      model->head.set_requires_grad(false);
      const DistributedDataParallel ddp(model);
      loss_of(model, tokens(world.rank(), 0)).backward();
      model->head.set_requires_grad(true);
      EXPECT_THAT(
          error_of([&] { loss_of(model, tokens(world.rank(), 1)).backward(); }),
          AllOf(HasSubstr("\"head\""), HasSubstr("Make a new one")));
    }
    { // registered, and on one rank only
      Stack model = make_stack();
      const DistributedDataParallel ddp(model);
      if (world.rank() == 1) {
        model->register_parameter("extra", torch::ones({1}, at::kDouble));
      }
      EXPECT_THAT(
          error_of([&] { loss_of(model, tokens(world.rank(), 0)).backward(); }),
          AllOf(HasSubstr("rank 1"), HasSubstr("\"extra\"")));
    }
    { // one that is made anew averages it
      Stack model = make_stack();
      model->head.set_requires_grad(false);
      { const DistributedDataParallel ddp(model); }
      model->head.set_requires_grad(true);
      const DistributedDataParallel ddp(model);
      loss_of(model, tokens(world.rank(), 0)).backward();
      Stack plain = make_stack();
      loss_of(plain, all_tokens(world.size(), 0)).backward();
      EXPECT_TRUE(torch::allclose(model->head.grad(), plain->head.grad()));
    }
  });
}

TEST(DdpTest, ARankThatStopsEarlyIsNamed) {
  on_ranks(
      {.size = 2, .timeout = std::chrono::seconds(8)}, [](const Group& world) {
        // Dead afterwards, so not the world.
        const Group group = world.split(0).value();
        Parts model;
        DistributedDataParallel ddp(model, DDPOptions().process_group(group));
        ddp(std::vector{0, 1, 2}).sum().backward();
        if (world.rank() == 0) {
          EXPECT_THAT(
              error_of([&] {
                ddp(std::vector{0, 1, 2}).sum().backward();
              }),
              HasSubstr("rank 1"));
        } else {
          std::this_thread::sleep_for(std::chrono::seconds(9));
        }
      });
}

/// Rank r has 2 + r inputs; a rank without contributes zeros.
TEST(DdpJoinTest, UnevenInputsAverageOverAllRanks) {
  on_ranks(3, [](const Group& world) {
    for (const bool through_handle : {true, false}) {
      torch::manual_seed(world.rank());
      torch::nn::Sequential model(
          torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3));
      DistributedDataParallel ddp(model);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      int iteration = 0;
      Join::run({&ddp}, [&] {
        for (; iteration < 2 + world.rank(); ++iteration) {
          optimizer.zero_grad();
          const at::Tensor x = torch::randn({5, 4});
          const at::Tensor y = through_handle ? ddp(x) : model->forward(x);
          (y * torch::arange(3)).sum().backward();
          // d(sum y_j * j) / d(bias_j of the norm) = 5 j on each rank that
          // trains.
          const int at_work = iteration < 2 ? 3 : 3 - (iteration - 1);
          EXPECT_TRUE(torch::allclose(
              model->parameters()[3].grad(),
              5.f * torch::arange(3) * at_work / 3));
          optimizer.step();
        }
      });
      // All ranks have the model of the last one.
      for (const at::Tensor& param : model->parameters()) {
        const at::Tensor all = torch::empty({3, param.numel()});
        world.all_gather_into(all, param.detach());
        EXPECT_TRUE(torch::equal(all[0], all[2]));
        EXPECT_TRUE(torch::equal(all[1], all[2]));
      }
      EXPECT_EQ(model->buffers()[2].item<int64_t>(), 4); // num_batches_tracked
    }
  });
}

TEST(DdpJoinTest, NoSyncUnderJoinAddsUp) {
  on_ranks(2, [](const Group& world) {
    Parts model;
    DistributedDataParallel ddp(model);
    Join::run({&ddp}, [&] {
      for (int i = 0; i < 1 + world.rank(); ++i) {
        model->zero_grad();
        {
          const auto no_sync = ddp.no_sync();
          ddp(std::vector{0, 1, 2}).sum().backward();
        }
        ddp(std::vector{0, 1, 2}).sum().backward();
        EXPECT_TRUE(torch::equal(
            model->layers[2]->bias.grad(),
            torch::full({2}, i == 0 ? 2.f : 1.f)));
      }
    });
  });
}

} // namespace
} // namespace tessera
