// The loss of a sharded model: the weight is a parameter that is gathered.
#include <tessera/nn/linear_cross_entropy.h>
#include <tessera/recompute/recompute.h>

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "engine/schedule.h"
#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

enum class Form { Mean, ByToken, Recomputed };

at::Tensor hidden_of(Stack& model, const at::Tensor& x) {
  auto hidden = model->embed(x);
  for (const auto& block : *model->blocks) {
    hidden = block->as<Block>()->forward(hidden);
  }
  return hidden;
}

/// loss_of() without logits, in chunks of 3 of the 10 tokens.
at::Tensor chunked_loss_of(Stack& model, const at::Tensor& x, Form form) {
  const auto targets = x.roll(1, 1);
  auto options = LinearCrossEntropyOptions().batch_chunk_size(3);
  const auto hidden = hidden_of(model, x);
  switch (form) {
    case Form::ByToken:
      return linear_cross_entropy(
                 hidden, model->head, targets, options.reduction(torch::kNone))
          .mean();
    case Form::Recomputed:
      return recompute(
          [model, targets, options](const at::Tensor& input) {
            return linear_cross_entropy(input, model->head, targets, options);
          },
          hidden);
    case Form::Mean:
      break;
  }
  return linear_cross_entropy(hidden, model->head, targets, options);
}

/// This rank's shard.
at::Tensor shard_of(Stack& model, const std::string& name) {
  for (const auto& [own_name, shard] : named_parameters(*model)) {
    if (own_name == name) {
      return shard;
    }
  }
  throw std::out_of_range("no parameter " + name);
}

/// Of the whole gradient of a parameter, from the shards of all ranks.
double gradient_norm(const Group& world, const at::Tensor& shard) {
  const at::Tensor squares = torch::zeros({1}, torch::kDouble);
  if (shard.grad().defined()) {
    squares.add_(shard.grad().to(torch::kDouble).square().sum());
  }
  world.all_reduce(squares);
  return squares.sqrt().item<double>();
}

void train(Stack& model, int rank, Form form) {
  auto optimizer = make_adamw(parameters(*model));
  for (int step = 0; step < kSteps; ++step) {
    chunked_loss_of(model, tokens(rank, step), form).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

class ShardedLossTest
    : public ::testing::TestWithParam<std::tuple<int, ShardLayout, bool>> {
 protected:
  int size() const {
    return std::get<0>(GetParam());
  }
  FullyShardOptions options() const {
    return FullyShardOptions().layout(std::get<1>(GetParam()));
  }
  bool is_tied() const {
    return std::get<2>(GetParam());
  }
};

TEST_P(ShardedLossTest, TrainsAsThePlainModelDoesByItsLogits) {
  on_ranks(size(), [&](const Group& world) {
    auto reference = train_plain(world.size(), is_tied());
    for (const Form form : {Form::Mean, Form::ByToken, Form::Recomputed}) {
      Stack model = make_stack(is_tied());
      shard_blocks(model, options());
      train(model, world.rank(), form);
      expect_same_parameters(model, reference.model, 1e-9);
    }
  });
}

TEST_P(ShardedLossTest, TheUnitOfTheHeadIsGatheredOnce) {
  on_ranks(size(), [&](const Group& world) {
    Stack model = make_stack(is_tied());
    shard_blocks(model, options());
    auto& schedule = *engine::Schedule::of(world);
    schedule.probe_for_tests().counts = {};
    chunked_loss_of(model, tokens(world.rank(), 0), Form::Mean).backward();
    // The root, which has the head, and each block in forward and backward.
    const int64_t expected = world.size() == 1 ? 0 : 1 + 2 * kDepth;
    EXPECT_EQ(schedule.probe_for_tests().counts.gathers, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    ShardedLossTest,
    ::testing::Combine(
        ::testing::Values(1, 2, 4),
        ::testing::Values(ShardLayout::Flat, ShardLayout::Dim0),
        ::testing::Bool()),
    [](const auto& test) {
      return std::to_string(std::get<0>(test.param)) +
          (std::get<1>(test.param) == ShardLayout::Flat ? "Flat" : "Dim0") +
          (std::get<2>(test.param) ? "Tied" : "");
    });

TEST(ShardedLossDtypeTest, MixedPrecisionCastsTheOtherOperand) {
  on_ranks(2, [](const Group& world) {
    Stack model = make_stack();
    model->to(at::kFloat);
    shard_blocks(
        model,
        FullyShardOptions().mp_policy(MixedPrecisionPolicy()
                                          .param_dtype(at::kBFloat16)
                                          .reduce_dtype(at::kFloat)));
    const auto x = tokens(world.rank(), 0);
    const auto hidden = hidden_of(model, x).to(at::kFloat);
    const auto loss = linear_cross_entropy(hidden, model->head, x.roll(1, 1));
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    loss.backward();
    Stack plain = make_stack();
    loss_of(plain, all_tokens(world.size(), 0)).backward();
    const auto exact = plain->head.grad();
    EXPECT_NEAR(
        gradient_norm(world, shard_of(model, "head")),
        exact.norm().item<double>(),
        0.02 * exact.norm().item<double>());
  });
}

TEST(ShardedLossDtypeTest, AFrozenHeadGetsNoGradient) {
  on_ranks(2, [](const Group& world) {
    Stack model = make_stack();
    shard_blocks(model);
    model->head.set_requires_grad(false);
    chunked_loss_of(model, tokens(world.rank(), 0), Form::Mean).backward();
    EXPECT_FALSE(shard_of(model, "head").grad().defined());
    EXPECT_GT(gradient_norm(world, shard_of(model, "embed.weight")), 0);
  });
}

} // namespace
} // namespace tessera
