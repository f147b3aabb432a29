#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/ddp/power_sgd.h>
#include <tessera/error.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using tessera::testing::error_of;
using tessera::testing::on_ranks;
using ::testing::HasSubstr;

/// Compresses from the third backward on, whatever the size.
PowerSGDOptions options_of(int64_t rank) {
  return PowerSGDOptions()
      .matrix_approximation_rank(rank)
      .start_powerSGD_iter(2)
      .min_compression_rate(0);
}

/// A bucket of one matrix and one bias, by hand.
class Buckets {
 public:
  Buckets(const Group& world, const PowerSGDOptions& options, bool batched)
      : world_(world),
        state_(std::make_shared<PowerSGDState>(world, options)),
        hook_(batched ? batched_powerSGD_hook(state_) : powerSGD_hook(state_)) {
    for (int i = 0; i < options.start_powerSGD_iter(); ++i) {
      reduce(torch::zeros({6, 4}, at::kDouble), torch::zeros({4}, at::kDouble));
    }
  }

  /// Both, after the hook.
  std::vector<at::Tensor> reduce(
      const at::Tensor& matrix,
      const at::Tensor& bias) {
    const at::Tensor flat = torch::cat({matrix.reshape({-1}), bias});
    const std::vector<at::Tensor> gradients{
        flat.narrow(0, 0, matrix.numel()).view(matrix.sizes()),
        flat.narrow(0, matrix.numel(), bias.numel())};
    GradBucket bucket(0, true, flat, gradients, gradients);
    const at::Tensor result = hook_(bucket)();
    EXPECT_TRUE(result.is_same(flat));
    return gradients;
  }

  at::Tensor average(const at::Tensor& tensor) const {
    const at::Tensor sum = tensor.clone();
    world_.all_reduce(sum, ReduceOp::Avg);
    return sum;
  }

  PowerSGDState& state() {
    return *state_;
  }

 private:
  const Group world_;
  std::shared_ptr<PowerSGDState> state_;
  CommHook hook_;
};

at::Tensor random_matrix(const Group& world, int step = 0) {
  torch::manual_seed(10 * step + world.rank());
  return torch::randn({6, 4}, at::kDouble);
}

at::Tensor random_bias(const Group& world, int step = 0) {
  torch::manual_seed(100 + 10 * step + world.rank());
  return torch::randn({4}, at::kDouble);
}

TEST(PowerSgdTest, FullRankIsTheAverage) {
  on_ranks(3, [](const Group& world) {
    for (const double epsilon : {0., 1e-12}) {
      Buckets buckets(
          world, options_of(4).orthogonalization_epsilon(epsilon), false);
      const at::Tensor matrix = random_matrix(world);
      const at::Tensor bias = random_bias(world);
      const auto result = buckets.reduce(matrix, bias);
      EXPECT_TRUE(torch::allclose(result[0], buckets.average(matrix), 0, 1e-9));
      EXPECT_TRUE(torch::equal(result[1], buckets.average(bias)));
    }
  });
}

TEST(PowerSgdTest, FullRankOfAWholeBucketIsTheAverage) {
  on_ranks(2, [](const Group& world) {
    Buckets buckets(world, options_of(6), true); // 28 elements: 6 x 6
    const at::Tensor matrix = random_matrix(world);
    const at::Tensor bias = random_bias(world);
    const auto result = buckets.reduce(matrix, bias);
    EXPECT_TRUE(torch::allclose(result[0], buckets.average(matrix), 0, 1e-9));
    EXPECT_TRUE(torch::allclose(result[1], buckets.average(bias), 0, 1e-9));
  });
}

/// Whatever the random factor: the result R of an average A has that rank, and
/// is the projection of A on R's columns, so that R^T (A - R) = 0.
TEST(PowerSgdTest, TheResultIsAProjectionOfTheAverage) {
  on_ranks(2, [](const Group& world) {
    for (const int64_t rank : {1, 2, 3}) {
      Buckets buckets(world, options_of(rank), false);
      const at::Tensor matrix = random_matrix(world);
      const at::Tensor result = buckets.reduce(matrix, random_bias(world))[0];
      const at::Tensor average = buckets.average(matrix);
      EXPECT_EQ(torch::linalg_matrix_rank(result, 1e-9).item<int64_t>(), rank);
      EXPECT_LT(
          torch::mm(result.t(), average - result).abs().max().item<double>(),
          1e-9);
      EXPECT_GT((average - result).abs().max().item<double>(), 1e-3);
    }
  });
}

/// Power iteration: with warm starts, the factors of a constant gradient
/// converge to those of its singular values.
TEST(PowerSgdTest, WarmStartsComeToTheBestApproximation) {
  on_ranks(2, [](const Group& world) {
    const at::Tensor matrix = random_matrix(world);
    const at::Tensor bias = random_bias(world);
    const auto after = [&](bool warm_start) {
      Buckets buckets(
          world,
          options_of(2).use_error_feedback(false).warm_start(warm_start),
          false);
      for (int i = 0; i < 100; ++i) {
        buckets.reduce(matrix, bias);
      }
      return buckets.reduce(matrix, bias)[0];
    };
    const at::Tensor average = matrix.clone();
    world.all_reduce(average, ReduceOp::Avg);
    const auto [u, s, v] = torch::linalg_svd(average, /*full_matrices=*/false);
    const at::Tensor best =
        torch::mm(u.narrow(1, 0, 2) * s.narrow(0, 0, 2), v.narrow(0, 0, 2));
    EXPECT_TRUE(torch::allclose(after(true), best, 0, 1e-6));
    EXPECT_FALSE(torch::allclose(after(false), best, 0, 1e-6));
  });
}

/// Nothing is lost: what went out, and what the ranks still have on average, is
/// what came in.
TEST(PowerSgdTest, ErrorFeedbackKeepsWhatWasLost) {
  on_ranks(3, [](const Group& world) {
    for (const bool batched : {false, true}) {
      Buckets buckets(world, options_of(1), batched);
      EXPECT_FALSE(buckets.state().error(0).defined());
      at::Tensor in = torch::zeros({28}, at::kDouble);
      at::Tensor out = torch::zeros({28}, at::kDouble);
      for (int step = 0; step < 5; ++step) {
        const at::Tensor matrix = random_matrix(world, step);
        const at::Tensor bias = random_bias(world, step);
        in += torch::cat({matrix.view({-1}), bias});
        const auto result = buckets.reduce(matrix, bias);
        out += torch::cat({result[0].view({-1}), result[1]});
      }
      EXPECT_GT(buckets.state().error(0).abs().max().item<double>(), 1e-3);
      EXPECT_TRUE(torch::allclose(
          out + buckets.average(buckets.state().error(0)),
          buckets.average(in),
          0,
          1e-9));
    }
  });
}

TEST(PowerSgdTest, SmallGradientsAndFirstStepsAreAveraged) {
  on_ranks(2, [](const Group& world) {
    auto state = std::make_shared<PowerSGDState>(
        world, PowerSGDOptions().start_powerSGD_iter(3));
    torch::nn::Linear model(torch::nn::LinearOptions(16, 16));
    DistributedDataParallel ddp(model);
    ddp.register_comm_hook(powerSGD_hook(state));
    for (int step = 0; step < 5; ++step) {
      torch::manual_seed(10 * step + world.rank());
      const at::Tensor x = torch::randn({3, 16});
      model->zero_grad();
      ddp(x).square().sum().backward();
      const auto local = torch::autograd::grad(
          {model->forward(x).square().sum()}, {model->weight, model->bias});
      const at::Tensor weight = local[0].clone();
      const at::Tensor bias = local[1].clone();
      world.all_reduce(weight, ReduceOp::Avg);
      world.all_reduce(bias, ReduceOp::Avg);
      EXPECT_TRUE(torch::allclose(model->bias.grad(), bias));
      EXPECT_EQ(
          torch::allclose(model->weight.grad(), weight, 1e-4, 1e-4), step < 3)
          << "step " << step;
    }
    EXPECT_EQ(state->iteration(), 5);
  });
}

/// A layer learns another one's weights.
double loss_after_training(const Group& world, CommHook hook) {
  torch::manual_seed(0);
  torch::nn::Linear model(8, 8);
  const at::Tensor truth = torch::randn({8, 8});
  DistributedDataParallel ddp(model);
  ddp.register_comm_hook(std::move(hook));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  at::Tensor loss;
  for (int step = 0; step < 300; ++step) {
    torch::manual_seed(10 * step + world.rank());
    const at::Tensor x = torch::randn({16, 8});
    optimizer.zero_grad();
    loss = (ddp(x) - torch::mm(x, truth)).square().mean();
    loss.backward();
    optimizer.step();
  }
  return loss.item<double>();
}

TEST(PowerSgdTest, TrainingConverges) {
  on_ranks(2, [](const Group& world) {
    const auto with = [&](bool feedback) {
      return std::make_shared<PowerSGDState>(
          world, options_of(1).use_error_feedback(feedback));
    };
    EXPECT_LT(loss_after_training(world, powerSGD_hook(with(true))), 1e-4);
    EXPECT_LT(
        loss_after_training(world, batched_powerSGD_hook(with(true))), 1e-3);
  });
}

TEST(PowerSgdTest, RejectsOptions) {
  on_ranks(2, [](const Group& world) {
    EXPECT_THAT(
        error_of([&] {
          PowerSGDState(world, PowerSGDOptions().start_powerSGD_iter(1));
        }),
        HasSubstr("Expect `start_powerSGD_iter` > 1"));
    PowerSGDState(
        world,
        PowerSGDOptions()
            .start_powerSGD_iter(0)
            .use_error_feedback(false)
            .warm_start(false));
    EXPECT_THROW(PowerSGDState(world, options_of(0)), c10::ValueError);
    EXPECT_THROW(
        PowerSGDState(world, options_of(1 + world.rank())), DisagreementError);
  });
}

} // namespace
} // namespace tessera
