// Sharded training on a GPU: alone, and two ranks that share it.
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/recompute/recompute.h>

#include <ATen/autocast_mode.h>

#include "fsdp/models.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::on_ranks;
using tessera::testing::Stack;

class CudaFullyShardTest : public ::testing::TestWithParam<int> {};

TEST_P(CudaFullyShardTest, TrainingMatchesSingleProcess) {
  on_ranks(GetParam(), [](const Group& world) {
    const auto train = [](Stack& model, const std::vector<at::Tensor>& leaves) {
      optim::AdamW optimizer(leaves, 1e-2);
      for (int step = 0; step < 4; ++step) {
        torch::manual_seed(step); // the same data on every rank
        const auto ids = torch::randint(0, 11, {3, 5}, at::kLong).cuda();
        model->forward(ids).square().mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    const auto make = [] {
      torch::manual_seed(0);
      Stack model(11, 8, 3);
      model->to(at::kDouble);
      model->to(at::Device(at::kCUDA, 0));
      return model;
    };
    auto plain = make();
    train(plain, plain->parameters());
    auto sharded = make();
    for (const auto& block : *sharded->blocks) {
      fully_shard(*block);
    }
    fully_shard(*sharded);
    train(sharded, parameters(*sharded));
    torch::NoGradGuard no_grad;
    const auto expected = plain->named_parameters();
    for (const auto& item : sharded->named_parameters()) {
      const double worst =
          (item.value() - expected[item.key()]).abs().max().item<double>();
      EXPECT_LE(worst, world.size() == 1 ? 0 : 1e-9) << item.key();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaFullyShardTest, ::testing::Values(1, 2));

class CudaRecomputeTest
    : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(CudaRecomputeTest, HasTheSameGradientsAsWithout) {
  const auto [size, sharded, autocast] = GetParam();
  on_ranks(
      size, [&, sharded = sharded, autocast = autocast](const Group& world) {
        const auto run = [&](int mode) {
          torch::manual_seed(0);
          Stack model(11, 8, 4);
          model->to(at::Device(at::kCUDA, 0));
          if (sharded) {
            for (const auto& block : *model->blocks) {
              fully_shard(*block);
            }
            fully_shard(*model);
          }
          torch::manual_seed(5 + world.rank());
          const auto ids = torch::randint(0, 11, {3, 5}, at::kLong).cuda();
          const auto call = [&](auto fn, const at::Tensor& in) {
            return mode == 0 ? fn(in) : recompute(fn, in);
          };
          if (autocast) {
            at::autocast::set_autocast_enabled(at::kCUDA, true);
            at::autocast::set_autocast_dtype(at::kCUDA, at::kHalf);
          }
          auto x = call(model->embed, ids);
          auto blocks = [=](at::Tensor h, int64_t begin, int64_t end) mutable {
            for (int64_t i = begin; i < end; ++i) {
              tessera::testing::Block block(
                  std::dynamic_pointer_cast<tessera::testing::BlockImpl>(
                      model->blocks->ptr(i)));
              h = call(
                  [block](const at::Tensor& in) mutable {
                    return torch::dropout(block(in), 0.3, true);
                  },
                  h);
            }
            return h;
          };
          if (mode == 2) {
            for (int64_t i = 0; i < 4; i += 2) {
              x = recompute(
                  [=](const at::Tensor& in) mutable {
                    return blocks(in, i, i + 2);
                  },
                  x);
            }
          } else {
            x = blocks(x, 0, 4);
          }
          if (autocast) {
            at::autocast::clear_cache();
            at::autocast::set_autocast_enabled(at::kCUDA, false);
          }
          const auto loss =
              torch::linear(x.to(at::kFloat), model->head).square().mean();
          loss.backward();
          std::vector<at::Tensor> result{loss.detach()};
          for (const auto& parameter : parameters(*model)) {
            EXPECT_TRUE(
                parameter.grad().defined() || parameter.numel() == 0 ||
                sharded);
            result.push_back(parameter.grad());
          }
          return result;
        };
        const auto expected = run(0);
        for (const int mode : {1, 2}) {
          const auto found = run(mode);
          for (size_t i = 0; i < found.size(); ++i) {
            ASSERT_EQ(found[i].defined(), expected[i].defined());
            if (found[i].defined()) {
              EXPECT_TRUE(torch::equal(found[i], expected[i]))
                  << mode << " " << i << " "
                  << (found[i] - expected[i]).abs().max().item<double>();
            }
          }
        }
      });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    CudaRecomputeTest,
    ::testing::Values(
        std::tuple(1, false, false),
        std::tuple(1, true, false),
        std::tuple(2, true, false),
        std::tuple(1, false, true),
        std::tuple(1, true, true)));

TEST(CudaRecomputeRngTest, DropoutOnTheDeviceDropsTheSameAgain) {
  const auto weight = torch::ones({1000}).cuda().requires_grad_();
  for (const bool preserve : {true, false}) {
    weight.mutable_grad().reset();
    const auto y = recompute(
        [weight](const at::Tensor& in) { // moved in there
          return torch::dropout(in.cuda() * weight, 0.5, true);
        },
        torch::ones({1000}),
        RecomputeOptions().preserve_rng_state(preserve));
    const auto next = torch::rand({2}, at::kCUDA);
    y.sum().backward();
    EXPECT_EQ(torch::equal(weight.grad(), y), preserve);
  }
}

} // namespace
} // namespace tessera
