// A program shards the blocks of a model, forgets the root, and gives its
// optimizer what it takes for the parameters: shards, and parameters that are
// not sharded, which each rank would train by its own gradients.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/error.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

Stack stack_without_root(const Group& group) {
  Stack model = make_stack();
  for (const auto& block : *model->blocks) {
    fully_shard(*block, FullyShardOptions().group(group));
  }
  return model;
}

std::vector<at::Tensor> shards_of(Stack& model) {
  std::vector<at::Tensor> all;
  for (const auto& block : *model->blocks) {
    const auto shards = parameters(*block);
    all.insert(all.end(), shards.begin(), shards.end());
  }
  return all;
}

std::vector<at::Tensor> plain_of(Stack& model) {
  return {model->embed->weight, model->head};
}

std::vector<at::Tensor> joined(
    std::vector<at::Tensor> first,
    const std::vector<at::Tensor>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

using Optimizers = std::vector<torch::optim::Optimizer*>;

struct Outcome {
  int steps = 0; // that ended
  std::string error;
};

/// `average` runs between backward and step.
Outcome train(
    const Group& world,
    Stack& model,
    const Optimizers& optimizers,
    const std::function<void()>& average = [] {}) {
  Outcome outcome;
  try {
    for (; outcome.steps < 4; ++outcome.steps) {
      loss_of(model, tokens(world.rank(), outcome.steps)).backward();
      average();
      for (auto* optimizer : optimizers) {
        optimizer->step();
        optimizer->zero_grad();
      }
    }
  } catch (const DisagreementError& thrown) {
    outcome.error = thrown.what();
  }
  return outcome;
}

/// As a program does that averages the rest by itself.
std::function<void()> average_plain(const Group& world, Stack& model) {
  return [&world, &model] {
    for (const at::Tensor& param : plain_of(model)) {
      world.all_reduce(param.grad(), ReduceOp::Avg);
    }
  };
}

class ForgottenRootTest
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  RanksOptions ranks() const {
    const auto& [backend, size] = GetParam();
    return {.size = size, .backend = backend};
  }
};

INSTANTIATE_TEST_SUITE_P(
    All,
    ForgottenRootTest,
    ::testing::Combine(
        ::testing::Values("auto", "gloo"),
        ::testing::Values(2, 4)),
    [](const auto& test) {
      return std::get<0>(test.param) + std::to_string(std::get<1>(test.param));
    });

TEST_P(ForgottenRootTest, IsFoundBeforeTheSecondStep) {
  on_ranks(ranks(), [](const Group& world) {
    for (const bool in_groups : {false, true}) {
      Stack model = stack_without_root(world);
      optim::AdamW optimizer(
          in_groups ? plain_of(model)
                    : joined(shards_of(model), plain_of(model)),
          1e-2);
      if (in_groups) {
        optimizer.add_param_group(
            torch::optim::OptimizerParamGroup(shards_of(model)));
      }
      const Outcome outcome = train(world, model, {&optimizer});
      EXPECT_EQ(outcome.steps, 1);
      EXPECT_THAT(
          outcome.error,
          AllOf(
              AnyOf(HasSubstr("shape [11, 6]"), HasSubstr("shape [6, 11]")),
              HasSubstr("of param group 0 of AdamW"),
              HasSubstr("nobody averages its gradients"),
              HasSubstr("fully_shard on the whole model")));
    }
  });
}

/// Ranks may have their parameters in another order.
TEST_P(ForgottenRootTest, IsFoundInAnyOrder) {
  on_ranks(ranks(), [](const Group& world) {
    for (const bool averages : {true, false}) {
      Stack model = stack_without_root(world);
      // Alike at first, in values and shape.
      const auto one = torch::zeros({3}, at::kDouble).requires_grad_();
      const auto other = torch::zeros({3}, at::kDouble).requires_grad_();
      auto all =
          joined(joined(shards_of(model), plain_of(model)), {one, other});
      if (world.rank() % 2 == 1) {
        std::reverse(all.begin(), all.end());
      }
      optim::SGD optimizer(all, 0.1);
      const Outcome outcome = train(world, model, {&optimizer}, [&] {
        one.mutable_grad() = torch::ones({3}, at::kDouble);
        other.mutable_grad() =
            torch::full({3}, averages ? 2. : 2. + world.rank(), at::kDouble);
        average_plain(world, model)();
      });
      EXPECT_EQ(outcome.steps, averages ? 4 : 1) << outcome.error;
      if (!averages) {
        EXPECT_THAT(outcome.error, HasSubstr("of shape [3]"));
      }
    }
  });
}

TEST_P(ForgottenRootTest, IsNotSuspectedWhereNothingDiverges) {
  on_ranks(ranks(), [](const Group& world) {
    { // the program averages
      Stack model = stack_without_root(world);
      optim::AdamW optimizer(joined(shards_of(model), plain_of(model)), 1e-2);
      const Outcome outcome =
          train(world, model, {&optimizer}, average_plain(world, model));
      EXPECT_EQ(outcome.steps, 4) << outcome.error;
    }
    { // the root is sharded after all
      Stack model = stack_without_root(world);
      fully_shard(*model);
      optim::AdamW optimizer(parameters(*model), 1e-2);
      EXPECT_EQ(train(world, model, {&optimizer}).steps, 4);
    }
    { // nobody trains it
      Stack model = stack_without_root(world);
      optim::AdamW optimizer(shards_of(model), 1e-2);
      EXPECT_EQ(train(world, model, {&optimizer}).steps, 4);
    }
    { // frozen
      Stack model = stack_without_root(world);
      for (const at::Tensor& param : plain_of(model)) {
        param.set_requires_grad(false);
      }
      optim::AdamW optimizer(joined(shards_of(model), plain_of(model)), 1e-2);
      EXPECT_EQ(train(world, model, {&optimizer}).steps, 4);
    }
  });
}

/// What a rank is to train by itself may begin alike if it has an optimizer of
/// its own, and differs from the beginning otherwise.
TEST_P(ForgottenRootTest, IsNotSuspectedOfWhatEachRankTrainsItself) {
  on_ranks(ranks(), [](const Group& world) {
    { // an optimizer of its own, also after one that had both
      Stack model = stack_without_root(world);
      {
        optim::SGD both(joined(shards_of(model), plain_of(model)), 0.1);
        EXPECT_EQ(
            train(world, model, {&both}, average_plain(world, model)).steps, 4);
      }
      optim::SGD shards(shards_of(model), 0.1);
      optim::SGD plain(plain_of(model), 0.1);
      const Outcome outcome = train(world, model, {&shards, &plain});
      EXPECT_EQ(outcome.steps, 4) << outcome.error;
    }
    { // a part that is each rank's own
      Stack model = stack_without_root(world);
      {
        const torch::NoGradGuard no_grad;
        model->head.mul_(1 + 0.1 * world.rank());
        model->embed->weight.mul_(1 + 0.1 * world.rank());
      }
      optim::SGD optimizer(joined(shards_of(model), plain_of(model)), 0.1);
      const Outcome outcome = train(world, model, {&optimizer});
      EXPECT_EQ(outcome.steps, 4) << outcome.error;
    }
  });
}

/// The gradients of a module beside the units are a DistributedDataParallel's.
TEST(ForgottenRootTest, MayBeAveragedByADistributedDataParallel) {
  on_ranks(2, [](const Group& world) {
    torch::manual_seed(3);
    torch::nn::Linear body(6, 6);
    torch::nn::Linear head(6, 2);
    fully_shard(*body);
    DistributedDataParallel ddp(head);
    auto all = joined(parameters(*body), head->parameters());
    optim::AdamW optimizer(all, 1e-2);
    for (int step = 0; step < 4; ++step) {
      const auto x = torch::full({2, 6}, 0.1 * (world.rank() + step));
      EXPECT_NO_THROW(head->forward(body->forward(x)).sum().backward());
      optimizer.step();
      optimizer.zero_grad();
    }
  });
}

} // namespace
} // namespace tessera
