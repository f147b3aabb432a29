// Whole models under recompute(), plain and sharded.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/schedule.h"
#include "fsdp/models.h"
#include "recompute/support.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using namespace tessera::testing::recomputation; // NOLINT: likewise
using ::testing::HasSubstr;
using torch::nn::Sequential;

enum class Mode { Plain, Blocks, Nested };

struct Case {
  int size;
  std::optional<ShardLayout> layout;
  std::optional<at::ScalarType> param_dtype = std::nullopt;
};

class RecomputeTrainingTest : public ::testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(const Group&)>& body) const {
    on_ranks(RanksOptions{.size = GetParam().size, .backend = "shm"}, body);
  }
  Stack make() const {
    torch::manual_seed(3);
    Stack model(kVocabulary, kWidth, kDepth);
    if (GetParam().layout) {
      const auto options = FullyShardOptions()
                               .layout(*GetParam().layout)
                               .mp_policy(MixedPrecisionPolicy().param_dtype(
                                   GetParam().param_dtype));
      for (const auto& block : *model->blocks) {
        fully_shard(*block, options);
      }
      fully_shard(*model, options);
    }
    return model;
  }
};

at::Tensor tokens(int rank, int step) {
  torch::manual_seed(1000 + 10 * step + rank);
  return torch::randint(0, kVocabulary, {2, 5}, torch::kLong);
}

at::Tensor run_blocks(
    Stack& model,
    at::Tensor x,
    int64_t begin,
    int64_t end,
    bool recomputes) {
  const Caller call{recomputes};
  for (int64_t i = begin; i < end; ++i) {
    Block block(std::dynamic_pointer_cast<BlockImpl>(model->blocks->ptr(i)));
    x = call(
        [block](const at::Tensor& in) mutable {
          return torch::dropout(block(in), 0.2, true);
        },
        x);
  }
  return x;
}

at::Tensor loss_of(Stack& model, const at::Tensor& ids, Mode mode) {
  const Caller call{mode != Mode::Plain};
  auto x = call(model->embed, ids);
  if (mode == Mode::Nested) {
    for (int64_t i = 0; i < kDepth; i += 2) {
      x = recompute(
          [model, i](const at::Tensor& in) mutable {
            return run_blocks(model, in, i, i + 2, true);
          },
          x);
    }
  } else {
    x = run_blocks(model, x, 0, kDepth, mode == Mode::Blocks);
  }
  const auto head = [weight = model->head](const at::Tensor& in) {
    return torch::linear(in, weight);
  };
  return torch::cross_entropy_loss(
      call(head, x).view({-1, kVocabulary}), ids.roll(1, 1).reshape({-1}));
}

/// Losses, gradients and parameters of a few steps.
Tensors train(Stack& model, const Group& world, Mode mode) {
  const auto leaves = parameters(*model);
  torch::optim::AdamW optimizer(leaves, torch::optim::AdamWOptions(1e-2));
  Tensors result;
  for (int step = 0; step < 3; ++step) {
    const auto loss = loss_of(model, tokens(world.rank(), step), mode);
    loss.backward();
    result.push_back(loss.detach());
    for (const auto& parameter : leaves) {
      result.push_back(
          parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& parameter : leaves) {
    result.push_back(parameter.detach());
  }
  return result;
}

TEST_P(RecomputeTrainingTest, HasTheSameBitsAsWithout) {
  run([&](const Group& world) {
    auto plain = make();
    const Tensors expected = train(plain, world, Mode::Plain);
    for (const Mode mode : {Mode::Blocks, Mode::Nested}) {
      auto model = make();
      const Tensors found = train(model, world, mode);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i) {
        SCOPED_TRACE(i);
        expect_same(found[i], expected[i]);
      }
    }
  });
}

TEST_P(RecomputeTrainingTest, AccumulationHasTheSameBitsAsWithout) {
  run([&](const Group& world) {
    std::vector<Tensors> gradients;
    for (const Mode mode : {Mode::Plain, Mode::Blocks}) {
      auto model = make();
      set_requires_gradient_sync(*model, false);
      loss_of(model, tokens(world.rank(), 0), mode).backward();
      set_requires_gradient_sync(*model, true);
      loss_of(model, tokens(world.rank(), 1), mode).backward();
      auto& mine = gradients.emplace_back();
      for (const auto& parameter : parameters(*model)) {
        mine.push_back(parameter.grad());
      }
    }
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      expect_same(gradients[0][i], gradients[1][i]);
    }
  });
}

TEST_P(
    RecomputeTrainingTest,
    AnExceptionInTheSecondRunIsFollowedByAHealthyStep) {
  run([&](const Group& world) {
    auto plain = make();
    const Tensors expected = train(plain, world, Mode::Plain);
    auto model = make();
    int calls = 0;
    const auto x =
        run_blocks(model, model->embed(tokens(world.rank(), 0)), 0, 2, true);
    const auto y = recompute(
        [&](const at::Tensor& in) {
          const auto out = run_blocks(model, in, 2, kDepth, true);
          if (++calls == 2) {
            throw std::out_of_range("on purpose");
          }
          return out;
        },
        x);
    EXPECT_THROW(y.sum().backward(), std::out_of_range);
    for (auto& parameter : parameters(*model)) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    const Tensors found = train(model, world, Mode::Blocks);
    for (size_t i = 0; i < found.size(); ++i) {
      expect_same(found[i], expected[i]);
    }
  });
}

TEST_P(RecomputeTrainingTest, GradOfAnActivationLeavesParametersAlone) {
  run([&](const Group& world) {
    Tensors found;
    for (const bool recomputes : {false, true}) {
      auto model = make();
      const auto x = noise({2, kWidth}, world.rank())
                         .to(GetParam().param_dtype.value_or(at::kFloat))
                         .requires_grad_();
      const auto y = run_blocks(model, x, 0, kDepth, recomputes);
      found.push_back(torch::autograd::grad({y.square().sum()}, {x})[0]);
      for (const auto& parameter : parameters(*model)) {
        EXPECT_FALSE(parameter.grad().defined());
      }
    }
    expect_same(found[0], found[1]);
  });
}

TEST_P(RecomputeTrainingTest, APenaltyOnGradientsOfInputsIsTheSame) {
  run([&](const Group& world) {
    std::vector<Tensors> found;
    for (const bool recomputes : {false, true}) {
      auto model = make();
      const auto x = noise({2, kWidth}, world.rank())
                         .to(GetParam().param_dtype.value_or(at::kFloat))
                         .requires_grad_();
      const auto y = run_blocks(model, x, 0, kDepth, recomputes).sum();
      const auto slope =
          torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
      (y + slope.square().sum()).backward();
      auto& gradients = found.emplace_back();
      for (const auto& parameter : parameters(*model)) {
        gradients.push_back(parameter.grad());
      }
    }
    for (size_t i = 0; i < found[0].size(); ++i) {
      expect_same(
          found[0][i], found[1][i], GetParam().param_dtype ? 0.1 : 1e-5);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    RecomputeTrainingTest,
    ::testing::Values(
        Case{1, std::nullopt},
        Case{1, ShardLayout::Flat},
        Case{1, ShardLayout::Dim0},
        Case{2, ShardLayout::Flat},
        Case{2, ShardLayout::Dim0},
        Case{2, ShardLayout::Flat, at::kBFloat16}),
    [](const auto& test) {
      const auto& layout = test.param.layout;
      return !layout ? std::string("Plain")
                     : (*layout == ShardLayout::Flat ? "Flat" : "Dim0") +
              std::to_string(test.param.size) +
              (test.param.param_dtype ? "Mixed" : "");
    });

TEST(RecomputeScheduleTest, RejectsShardedParametersChangedSinceForward) {
  on_ranks(2, [](const Group&) {
    torch::nn::Linear linear(4, 4);
    fully_shard(*linear);
    const auto x = torch::ones({1, 4});
    const at::Tensor loss = recompute(linear, x).sum();
    {
      torch::NoGradGuard no_grad;
      for (const auto& leaf : parameters(*linear)) {
        leaf.add_(1);
      }
    }
    linear->forward(x); // gathered anew: nothing looks stale
    try {
      loss.backward();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("the shard was changed"));
    }
  });
}

TEST(RecomputeScheduleTest, IssuesExactlyTheCollectivesOfAPlainStep) {
  on_ranks(2, [](const Group& world) {
    for (const Mode mode : {Mode::Plain, Mode::Blocks, Mode::Nested}) {
      torch::manual_seed(0);
      Stack model(kVocabulary, kWidth, kDepth);
      // Units of two blocks: each gets gradients from two recomputations.
      for (int64_t i = 0; i < kDepth; i += 2) {
        Sequential pair;
        for (int64_t j = i; j < i + 2; ++j) {
          pair->push_back(Block(
              std::dynamic_pointer_cast<BlockImpl>(model->blocks->ptr(j))));
        }
        fully_shard(*pair);
      }
      fully_shard(*model);
      auto& schedule = *engine::Schedule::of(world);
      for (int step = 0; step < 3; ++step) {
        schedule.probe_for_tests().counts = {};
        loss_of(model, tokens(world.rank(), step), mode).backward();
        // Forward: the root and each unit; backward: each unit but the last,
        // which is still gathered, and all reductions once the gradients exist.
        EXPECT_EQ(
            schedule.probe_for_tests().counts.gathers, 1 + 2 * (kDepth / 2));
        EXPECT_EQ(schedule.probe_for_tests().counts.reductions, 1 + kDepth / 2);
      }
    }
  });
}

} // namespace
} // namespace tessera
