// Steps inside backward, beyond PyTorch's own test in tests/parity.
#include <tessera/error.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/zero/ddp_zero_hook.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/errors.h"
#include "support/ranks.h"
#include "zero/bucket_assignment.h"
#include "zero/support.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;
using zero::BucketPiece;

// --- Who steps what

TEST(BucketAssignmentTest, WholeBucketsGoRoundTheRanks) {
  EXPECT_THAT(
      zero::assign_whole_buckets({{5}, {1, 2}, {7}}, 2),
      ElementsAre(
          ElementsAre(BucketPiece{0, 1, 0}),
          ElementsAre(BucketPiece{0, 2, 1}),
          ElementsAre(BucketPiece{0, 1, 0})));
}

/// 36 elements, so that 18 are a share. The smaller bucket first: 10 to rank 0.
/// Of the other 12 + 6 would reach the share, and so would 6 + 8 not.
TEST(BucketAssignmentTest, LargeBucketsAreCutBeforeTheyReachTheShare) {
  EXPECT_THAT(
      zero::assign_even_buckets({{12, 6, 8}, {4, 6}}, 2),
      ElementsAre(
          ElementsAre(BucketPiece{0, 1, 1}, BucketPiece{1, 3, 0}),
          ElementsAre(BucketPiece{0, 2, 0})));
}

/// 1 + 10 reach the share of 11, and so does every neighbour: four pieces for
/// two ranks.
TEST(BucketAssignmentTest, ABucketMayHaveMorePiecesThanRanks) {
  EXPECT_THAT(
      zero::assign_even_buckets({{1, 10, 1, 10}}, 2),
      ElementsAre(ElementsAre(
          BucketPiece{0, 1, 0},
          BucketPiece{1, 2, 1},
          BucketPiece{2, 3, 0},
          BucketPiece{3, 4, 0})));
}

TEST(BucketAssignmentTest, AParameterAboveTheShareIsAPieceOfItsOwn) {
  EXPECT_THAT(
      zero::assign_even_buckets({{100, 1}}, 4),
      ElementsAre(ElementsAre(BucketPiece{0, 1, 0}, BucketPiece{1, 2, 1})));
}

// --- Training

torch::nn::Sequential make_model() {
  torch::manual_seed(0);
  torch::nn::Sequential model(
      torch::nn::Linear(7, 13),
      torch::nn::Tanh(),
      torch::nn::Linear(13, 5),
      torch::nn::Tanh(),
      torch::nn::Linear(5, 3));
  model->to(at::kDouble);
  return model;
}

/// Not the same on two ranks or in two steps.
at::Tensor input(const Group& world, int step) {
  torch::manual_seed(100 + 10 * step + world.rank());
  return torch::randn({4, 7}, at::kDouble);
}

/// Every parameter in a bucket of its own.
DDPOptions tiny_buckets() {
  return DDPOptions().first_bucket_mb(1e-6).bucket_cap_mb(1e-6);
}

std::vector<at::Tensor> values_of(const torch::nn::Sequential& model) {
  std::vector<at::Tensor> values;
  for (const at::Tensor& param : model->parameters()) {
    values.push_back(param.detach().clone());
  }
  return values;
}

struct Way {
  bool is_interleaved = false;
  bool shard_buckets = false;
};
constexpr Way kWays[] = {
    {false, false},
    {false, true},
    {true, false},
    {true, true}};

/// A model whose backward steps.
struct Overlapped {
  Overlapped(
      const Group& world,
      const MakeOptimizer& make_optimizer,
      Way way = {},
      const DDPOptions& options = tiny_buckets(),
      CommHook hook = nullptr)
      : ddp(model, options) {
    zero.emplace(
        model->parameters(),
        make_optimizer,
        ZeroOptions().overlap_with_ddp(true));
    hook = hook ? std::move(hook) : allreduce_hook(world);
    ddp.register_comm_hook(
        (way.is_interleaved ? hook_with_zero_step_interleaved
                            : hook_with_zero_step)(
            std::move(hook), ddp, *zero, way.shard_buckets));
  }

  /// Through the handle or without it, which must not matter.
  void train(const at::Tensor& x, bool through_handle = true) {
    model->zero_grad();
    (through_handle ? ddp(x) : model->forward(x)).square().mean().backward();
  }

  void warm_up(const Group& world) {
    for (int i = 0; i < 2; ++i) {
      train(input(world, 50 + i));
    }
  }

  torch::nn::Sequential model = make_model();
  DistributedDataParallel<torch::nn::SequentialImpl> ddp;
  std::optional<ZeroRedundancyOptimizer> zero;
};

/// The same with steps of its own.
struct Plain {
  explicit Plain(const MakeOptimizer& make_optimizer)
      : ddp(model, tiny_buckets()),
        optimizer(make_optimizer({OptimizerParamGroup(model->parameters())})) {}

  void train(const at::Tensor& x) {
    model->zero_grad();
    ddp(x).square().mean().backward();
    optimizer->step();
  }

  torch::nn::Sequential model = make_model();
  DistributedDataParallel<torch::nn::SequentialImpl> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

void expect_matches_plain(
    const Group& world,
    const MakeOptimizer& make_optimizer,
    Way way,
    CommHook hook = nullptr) {
  Overlapped overlapped(
      world, make_optimizer, way, tiny_buckets(), std::move(hook));
  Plain plain(make_optimizer);
  overlapped.warm_up(world);
  expect_equal(overlapped.model, plain.model);
  for (int step = 0; step < 4; ++step) {
    overlapped.train(input(world, step), step % 2 == 0);
    plain.train(input(world, step));
    expect_equal(overlapped.model, plain.model);
  }
  overlapped.zero->consolidate_state_dict();
  if (world.rank() == 0) {
    EXPECT_EQ(
        diff_state_dicts(
            overlapped.zero->state_dict(), optim::state_dict(*plain.optimizer)),
        "");
  }
}

MakeOptimizer adamw() {
  return optimizer_class<optim::AdamW>(optim::AdamWOptions(1e-2));
}

TEST(ZeroOverlapTest, EveryKindOfOptimizerMatchesStepsAfterBackward) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const Group& world) {
      for (const Way way : kWays) {
        expect_matches_plain(world, adamw(), way);
        expect_matches_plain(
            world,
            optimizer_class<torch::optim::Adam>(
                torch::optim::AdamOptions(1e-2)),
            way);
        // Has state from the start.
        expect_matches_plain(
            world,
            optimizer_class<torch::optim::Adagrad>(
                torch::optim::AdagradOptions(1e-2)),
            way);
      }
    });
  }
}

TEST(ZeroOverlapTest, AHookMayReturnAnotherTensor) {
  on_ranks(2, [](const Group& world) {
    for (const Way way : kWays) {
      expect_matches_plain(
          world,
          adamw(),
          way,
          [average = allreduce_hook(world)](GradBucket& bucket) -> CommFuture {
            return
                [reduction = average(bucket)] { return reduction().clone(); };
          });
    }
  });
}

TEST(ZeroOverlapTest, GradientsAfterBackwardAreAverages) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw(), {.is_interleaved = true});
    overlapped.warm_up(world);
    Plain plain(adamw());
    overlapped.train(input(world, 0));
    plain.train(input(world, 0));
    const auto params = overlapped.model->parameters();
    const auto expected = plain.model->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_TRUE(torch::equal(params[i].grad(), expected[i].grad()));
    }
  });
}

/// What the first bucket's parameter is when the last bucket comes.
at::Tensor value_at_last_bucket(const Group& world, bool is_interleaved) {
  at::Tensor first;
  at::Tensor seen;
  const auto average = allreduce_hook(world);
  Overlapped overlapped(
      world,
      optimizer_class<optim::SGD>(0.5),
      {.is_interleaved = is_interleaved},
      tiny_buckets(),
      average);
  // Gradients come last layer first.
  first = overlapped.model->parameters()[5];
  overlapped.warm_up(world);
  const at::Tensor before = first.detach().clone();
  overlapped.model->parameters()[0].register_hook(
      [&](const at::Tensor& gradient) {
        seen = first.detach().clone();
        return gradient;
      });
  overlapped.train(input(world, 0));
  EXPECT_FALSE(torch::equal(first, before));
  return seen - before;
}

TEST(ZeroOverlapTest, InterleavedStepsRunBesideBackward) {
  on_ranks(1, [](const Group& world) {
    EXPECT_NE(value_at_last_bucket(world, true).abs().sum().item<double>(), 0);
    EXPECT_EQ(value_at_last_bucket(world, false).abs().sum().item<double>(), 0);
  });
}

TEST(ZeroOverlapTest, PartsOfABucketAreOneTensorAndSurviveAMove) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw(), {}, DDPOptions());
    Plain plain(adamw());
    overlapped.warm_up(world);
    for (int step = 0; step < 3; ++step) {
      overlapped.train(input(world, step));
      plain.train(input(world, step));
      const auto params = overlapped.model->parameters();
      EXPECT_TRUE(params[0].is_alias_of(params[1])); // one bucket in all
      const torch::NoGradGuard no_grad;
      for (const at::Tensor& param : params) { // as Module::to does
        param.set_data(param.detach().clone());
      }
    }
    expect_equal(overlapped.model, plain.model);
  });
}

TEST(ZeroOverlapTest, SchedulersDriveIt) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw());
    Plain plain(adamw());
    overlapped.warm_up(world);
    torch::optim::StepLR scheduler(*overlapped.zero, 1, 0.5);
    torch::optim::StepLR plain_scheduler(*plain.optimizer, 1, 0.5);
    for (int step = 0; step < 3; ++step) {
      overlapped.train(input(world, step));
      plain.train(input(world, step));
      scheduler.step();
      plain_scheduler.step();
      expect_equal(overlapped.model, plain.model);
    }
    // The learning rate of the last step.
    EXPECT_LT(
        overlapped.zero->optim().param_groups()[0].options().get_lr(), 1e-2);
  });
}

TEST(ZeroOverlapTest, NoSyncAddsUpAndStepsOnce) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw(), {.is_interleaved = true});
    Plain plain(adamw());
    overlapped.warm_up(world);
    for (auto* ddp : {&overlapped.ddp, &plain.ddp}) {
      (*ddp)->zero_grad();
      {
        const auto no_sync = ddp->no_sync();
        (*ddp)(input(world, 0)).sum().backward();
      }
      (*ddp)(input(world, 1)).sum().backward();
    }
    plain.optimizer->step();
    expect_equal(overlapped.model, plain.model);
  });
}

TEST(ZeroOverlapTest, LoadedStateIsStepped) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw(), {.shard_buckets = true});
    Plain plain(adamw());
    plain.train(input(world, 0));
    const StateDict saved = optim::state_dict(*plain.optimizer).clone();
    overlapped.warm_up(world);
    overlapped.train(input(world, 9)); // makes state
    overlapped.zero->load_state_dict(saved);
    {
      const torch::NoGradGuard no_grad;
      const auto from = plain.model->parameters();
      const auto to = overlapped.model->parameters();
      for (size_t i = 0; i < from.size(); ++i) {
        to[i].copy_(from[i]);
      }
    }
    overlapped.train(input(world, 1));
    plain.train(input(world, 1));
    expect_equal(overlapped.model, plain.model);
  });
}

/// Whose numbers differ from those of the world.
TEST(ZeroOverlapTest, SubgroupsMatchStepsAfterBackward) {
  on_ranks(4, [](const Group& world) {
    const auto group = world.subgroup({1, 3});
    if (!group) {
      return;
    }
    for (const Way way : kWays) {
      auto model = make_model();
      auto plain = make_model();
      const auto options = tiny_buckets().process_group(*group);
      DistributedDataParallel ddp(model, options);
      DistributedDataParallel plain_ddp(plain, options);
      ZeroRedundancyOptimizer overlapped(
          model->parameters(),
          adamw(),
          ZeroOptions().process_group(*group).overlap_with_ddp(true));
      ZeroRedundancyOptimizer zero(
          plain->parameters(), adamw(), ZeroOptions().process_group(*group));
      ddp.register_comm_hook(
          (way.is_interleaved ? hook_with_zero_step_interleaved
                              : hook_with_zero_step)(
              allreduce_hook(*group), ddp, overlapped, way.shard_buckets));
      for (int step = 0; step < 5; ++step) {
        model->zero_grad();
        ddp(input(world, step)).square().mean().backward();
        if (step >= 2) {
          zero.zero_grad();
          plain_ddp(input(world, step)).square().mean().backward();
          zero.step();
        }
        expect_equal(model, plain);
      }
    }
  });
}

/// Rank r has 2 + r inputs.
TEST(ZeroOverlapTest, JoiningTheModelMatchesStepsAfterBackward) {
  on_ranks(3, [](const Group& world) {
    for (const Way way : kWays) {
      Overlapped overlapped(world, optimizer_class<optim::SGD>(0.1), way);
      Plain plain(optimizer_class<optim::SGD>(0.1));
      overlapped.warm_up(world);
      Join::run({&overlapped.ddp}, [&] {
        for (int step = 0; step < 2 + world.rank(); ++step) {
          overlapped.train(input(world, step));
        }
      });
      Join::run({&plain.ddp}, [&] {
        for (int step = 0; step < 2 + world.rank(); ++step) {
          plain.train(input(world, step));
        }
      });
      expect_equal(overlapped.model, plain.model);
    }
  });
}

// --- What goes wrong

TEST(ZeroOverlapTest, AnOldGraphIsNotRunBackward) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw());
    overlapped.warm_up(world);
    const at::Tensor old =
        overlapped.model
            ->forward(torch::ones({1, 7}, at::kDouble).requires_grad_(true))
            .sum();
    overlapped.train(input(world, 0));
    EXPECT_THAT(
        error_of([&] { old.backward(); }),
        HasSubstr("modified by an inplace operation"));
  });
}

TEST(ZeroOverlapTest, RejectsWhatItCannotStep) {
  on_ranks(2, [](const Group& world) {
    auto model = make_model();
    DistributedDataParallel ddp(model);
    const CommHook average = allreduce_hook(world);
    ZeroRedundancyOptimizer without(model->parameters(), adamw());
    for (const auto make :
         {hook_with_zero_step, hook_with_zero_step_interleaved}) {
      EXPECT_THROW(make(average, ddp, without, false), c10::ValueError);
      EXPECT_THAT(
          error_of([&] { make(average, ddp, without, true); }),
          HasSubstr(
              "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook properly"));
    }
    const auto overlap = ZeroOptions().overlap_with_ddp(true);
    ZeroRedundancyOptimizer alone(
        model->parameters(),
        adamw(),
        ZeroOptions(overlap).process_group(world.alone()));
    EXPECT_THAT(
        error_of([&] { hook_with_zero_step(average, ddp, alone); }),
        HasSubstr("different ranks"));
    ZeroRedundancyOptimizer zero(model->parameters(), adamw(), overlap);
    EXPECT_THAT(
        error_of([&] { hook_with_zero_step(nullptr, ddp, zero); }),
        HasSubstr("no hook that averages"));
    hook_with_zero_step(average, ddp, zero);
    EXPECT_THAT(
        error_of([&] { hook_with_zero_step(average, ddp, zero); }),
        HasSubstr("already used by a hook"));
  });
}

TEST(ZeroOverlapTest, RejectsMoreThanOneGroup) {
  on_ranks(2, [](const Group&) {
    auto model = make_model();
    const auto params = model->parameters();
    const auto overlap = ZeroOptions().overlap_with_ddp(true);
    const auto text = HasSubstr("only supports a single parameter group");
    EXPECT_THAT(
        error_of([&] {
          ZeroRedundancyOptimizer(
              {OptimizerParamGroup({params[0]}),
               OptimizerParamGroup({params[1]})},
              adamw(),
              overlap);
        }),
        text);
    ZeroRedundancyOptimizer zero({params[0]}, adamw(), overlap);
    EXPECT_THAT(
        error_of(
            [&] { zero.add_param_group(OptimizerParamGroup({params[1]})); }),
        text);
  });
}

TEST(ZeroOverlapTest, StateIsRefusedUntilBackwardsStep) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw());
    ZeroRedundancyOptimizer& zero = *overlapped.zero;
    const auto text = HasSubstr(
        "should not be called until this ZeroRedundancyOptimizer instance has been fully initialized");
    for (int i = 0; i < 3; ++i) {
      EXPECT_THAT(error_of([&] { zero.consolidate_state_dict(); }), text);
      EXPECT_THAT(error_of([&] { zero.state_dict(); }), text);
      EXPECT_THAT(error_of([&] { zero.load_state_dict({}); }), text);
      EXPECT_THAT(error_of([&] { zero.initialize_state(); }), text);
      EXPECT_THAT(error_of([&] { zero.optim(); }), text);
      if (i < 2) {
        overlapped.train(input(world, i));
      }
    }
    overlapped.train(input(world, 2));
    zero.consolidate_state_dict();
    EXPECT_EQ(zero.optim().param_groups().size(), 1u);
  });
}

TEST(ZeroOverlapTest, StepWarnsAndDoesNothing) {
  struct Listener : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      text += warning.msg();
    }
    std::string text;
  };
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw());
    overlapped.train(input(world, 0));
    const auto before = values_of(overlapped.model);
    Listener listener;
    {
      const c10::WarningUtils::WarningHandlerGuard guard(&listener);
      EXPECT_FALSE(overlapped.zero->step().defined());
    }
    EXPECT_THAT(
        listener.text,
        HasSubstr("`step()` should not be included in the training loop"));
    const auto after = values_of(overlapped.model);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(torch::equal(before[i], after[i]));
    }
  });
}

TEST(ZeroOverlapTest, RejectsJoiningTheOptimizer) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw());
    EXPECT_THROW(
        Join({&overlapped.ddp, &*overlapped.zero}), c10::NotImplementedError);
    EXPECT_EQ(overlapped.ddp.active_join(), nullptr);
  });
}

TEST(ZeroOverlapTest, RejectsParametersOfAnotherModel) {
  on_ranks(2, [](const Group& world) {
    for (const bool has_more : {false, true}) {
      auto model = make_model();
      DistributedDataParallel ddp(model);
      std::vector<at::Tensor> params = model->parameters();
      if (has_more) {
        params.push_back(torch::ones({2}, at::kDouble).requires_grad_(true));
      } else {
        params.pop_back();
      }
      ZeroRedundancyOptimizer zero(
          params, adamw(), ZeroOptions().overlap_with_ddp(true));
      ddp.register_comm_hook(
          hook_with_zero_step(allreduce_hook(world), ddp, zero));
      const auto train = [&] { ddp(input(world, 0)).sum().backward(); };
      train();
      train();
      EXPECT_THAT(
          error_of(train),
          HasSubstr(
              has_more ? "parameter 6 of the ZeroRedundancyOptimizer is not one"
                       : "1 parameters of the DistributedDataParallel"));
    }
  });
}

TEST(ZeroOverlapTest, RejectsAParameterThatWasFrozen) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(
        world, adamw(), {}, tiny_buckets().find_unused_parameters(true));
    overlapped.warm_up(world);
    overlapped.train(input(world, 0));
    overlapped.model->parameters()[0].requires_grad_(false);
    EXPECT_THAT(
        error_of([&] { overlapped.train(input(world, 1)); }),
        AllOf(HasSubstr("shape [13, 7] was frozen"), HasSubstr("overlap")));
  });
}

/// Throws if it is told to.
class Touchy : public optim::SGD {
 public:
  using optim::SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (is_bad) {
      throw std::runtime_error("a bad day");
    }
    return optim::SGD::step(std::move(closure));
  }
  bool is_bad = false;
};

TEST(ZeroOverlapTest, AStepThatThrowsOnOneRankThrowsOnAll) {
  on_ranks(3, [](const Group& world) {
    for (const Way way : kWays) {
      Overlapped overlapped(world, optimizer_class<Touchy>(0.1), way);
      overlapped.warm_up(world);
      overlapped.train(input(world, 0));
      auto& local = dynamic_cast<Touchy&>(overlapped.zero->optim());
      local.is_bad = world.rank() == 1;
      EXPECT_THAT(
          error_of([&] { overlapped.train(input(world, 1)); }),
          HasSubstr("a bad day"));
      local.is_bad = false;
      overlapped.train(input(world, 2)); // goes on
      const at::Tensor first = overlapped.model->parameters()[0].detach();
      const at::Tensor all = torch::empty({3, first.numel()}, at::kDouble);
      world.all_gather_into(all, first.contiguous());
      EXPECT_TRUE(torch::equal(all[0], all[1]));
      EXPECT_TRUE(torch::equal(all[0], all[2]));
    }
  });
}

TEST(ZeroOverlapTest, SurvivesAnExceptionInBackward) {
  on_ranks(2, [](const Group& world) {
    for (const bool while_waiting : {true, false}) {
      Overlapped overlapped(world, adamw());
      Plain plain(adamw());
      const auto fail = [&] {
        at::Tensor x = input(world, 0).requires_grad_(true);
        x.register_hook([](const at::Tensor&) -> at::Tensor {
          throw std::runtime_error("in backward");
        });
        overlapped.train(x);
      };
      overlapped.train(input(world, 0));
      if (while_waiting) {
        EXPECT_THAT(error_of(fail), HasSubstr("in backward"));
      }
      overlapped.train(input(world, 1));
      if (!while_waiting) {
        EXPECT_THAT(error_of(fail), HasSubstr("in backward"));
      }
      expect_equal(overlapped.model, plain.model);
      overlapped.train(input(world, 2));
      plain.train(input(world, 2));
      expect_equal(overlapped.model, plain.model);
    }
  });
}

TEST(ZeroOverlapTest, RejectsABackwardWithoutItsOptimizer) {
  on_ranks(2, [](const Group& world) {
    Overlapped overlapped(world, adamw());
    overlapped.warm_up(world);
    overlapped.zero.reset();
    EXPECT_THAT(
        error_of([&] { overlapped.train(input(world, 0)); }),
        HasSubstr("is gone"));
  });
}

} // namespace
} // namespace tessera
