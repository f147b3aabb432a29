// Steps of a plain model: random numbers, buffers, casts, results.
#include <tessera/recompute/recompute.h>

#include <ATen/autocast_mode.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "support/warnings.h"
#include "train/captured/captured_steps.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

class CapturedNetTest : public OnARecorder {};

TEST_F(CapturedNetTest, BuffersOfBatchNormAreCountedOncePerStep) {
  Netting eager(always_eager());
  Netting captured;
  for (int i = 0; i < 12; ++i) {
    EXPECT_TRUE(
        torch::equal(captured.step({batch_of(i)}), eager.step({batch_of(i)})));
  }
  EXPECT_TRUE(captured.step.was_replayed()) << captured.step.eager_reason();
  EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  EXPECT_EQ(captured.net->norm->num_batches_tracked.item<int64_t>(), 12);
}

TEST_F(CapturedNetTest, DropoutDiffersInEachReplayAndIsThatOfEagerSteps) {
  Netting eager(always_eager(), 0.5);
  Netting captured({}, 0.5);
  std::vector<at::Tensor> expected;
  torch::manual_seed(5);
  for (int i = 0; i < 12; ++i) {
    expected.push_back(eager.step({batch_of(0)}));
  }
  torch::manual_seed(5);
  for (int i = 0; i < 12; ++i) {
    EXPECT_TRUE(torch::equal(captured.step({batch_of(0)}), expected[i])) << i;
  }
  EXPECT_TRUE(captured.step.was_replayed());
  EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
}

/// A run that resumes makes the steps that it would have made.
TEST_F(CapturedNetTest, AResumedRunMakesTheSameSteps) {
  torch::manual_seed(5);
  Netting captured({}, 0.5);
  for (int i = 0; i < 8; ++i) {
    captured.step({batch_of(i)});
  }
  auto generator = at::globalContext().defaultGenerator(test_device());
  const auto position = generator.get_state().clone();
  const auto saved = captured.optimizer.state_dict().clone();
  const auto values = captured.snapshot();
  std::vector<at::Tensor> expected;
  for (int i = 8; i < 16; ++i) {
    expected.push_back(captured.step({batch_of(i)}));
  }
  EXPECT_TRUE(captured.step.was_replayed());

  Netting resumed({}, 0.5);
  {
    const at::NoGradGuard no_grad;
    auto tensors = resumed.net->parameters();
    const auto buffers = resumed.net->buffers();
    tensors.insert(tensors.end(), buffers.begin(), buffers.end());
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].copy_(values[i]);
    }
  }
  resumed.optimizer.load_state_dict(saved);
  generator.set_state(position);
  for (int i = 8; i < 16; ++i) {
    EXPECT_TRUE(torch::equal(resumed.step({batch_of(i)}), expected[i - 8]))
        << i;
  }
  EXPECT_TRUE(resumed.step.was_replayed());
  EXPECT_TRUE(all_equal(resumed.snapshot(), captured.snapshot()));
}

/// The loss is the caller's own: the next replay does not change it.
TEST_F(CapturedNetTest, ResultsAreKept) {
  Netting captured;
  std::vector<at::Tensor> losses;
  std::vector<double> values;
  for (int i = 0; i < 8; ++i) {
    losses.push_back(captured.step({batch_of(i)}));
    values.push_back(losses.back().item<double>());
  }
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(losses[i].item<double>(), values[i]);
  }
}

/// In eager steps as in replays the caller gets values, and no graph.
TEST_F(CapturedNetTest, ResultsAreDetachedAndTheCallersOwn) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  const auto inner = plain_step(net, optimizer);
  bool gives_statistics = false;
  CapturedStep step(net, {optimizer}, [&](const Inputs& inputs) {
    inner(inputs);
    return gives_statistics ? net->norm->running_mean : net->last->weight * 2;
  });
  for (int i = 0; i < 12; ++i) {
    gives_statistics = i >= 6;
    const auto x = batch_of(i).narrow(0, 0, i < 6 ? 6 : 5);
    const auto result = step({x});
    const auto values = result.clone();
    EXPECT_FALSE(result.requires_grad());
    net->norm->running_mean.add_(1);
    EXPECT_TRUE(torch::equal(result, values)) << i;
  }
  EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
}

/// Replays with random numbers and several micro-batches.
TEST_F(CapturedNetTest, ReplaysWithDropoutAndAccumulationEqualEagerSteps) {
  on_ranks(1, [&](const Group&) {
    struct Trainee {
      Net net = make_net(0.3);
      optim::AdamW optimizer{net->parameters(), 0.01};
      GradientAccumulation sums{
          net,
          {optimizer},
          GradientAccumulationOptions().steps(2).max_norm(1.0)};

      at::Tensor operator()(const Inputs& inputs) {
        at::Tensor sum;
        for (const at::Tensor& batch : inputs) {
          const auto loss = net->forward(batch).square().mean();
          sums.backward(loss);
          sum = sum.defined() ? sum + loss.detach() : loss.detach();
        }
        return sum;
      }
    };
    const int calls = many_steps();
    const auto losses = [&](Trainee& trainee,
                            const CapturedStepOptions& options) {
      CapturedStep step(
          trainee.net, {trainee.optimizer}, std::ref(trainee), options);
      torch::manual_seed(5);
      std::vector<at::Tensor> all;
      for (int i = 0; i < calls; ++i) {
        all.push_back(step({batch_of(i % 17), batch_of(i % 13)}));
      }
      EXPECT_EQ(step.num_graphs(), options.warmup_steps() < calls ? 1 : 0)
          << step.eager_reason();
      return all;
    };
    Trainee eager;
    Trainee captured;
    EXPECT_TRUE(all_equal(losses(captured, {}), losses(eager, always_eager())));
    EXPECT_TRUE(all_equal(captured.net->parameters(), eager.net->parameters()));
  });
}

/// Gradients that a step leaves are there after each replay.
TEST_F(CapturedNetTest, GradientsThatAStepLeavesAreThoseOfTheReplay) {
  const auto make = [](Net& net, optim::AdamW& optimizer) {
    return [&](const Inputs& inputs) {
      optimizer.zero_grad();
      const auto loss = net->forward(inputs[0]).square().mean();
      loss.backward();
      optimizer.step();
      return loss.detach();
    };
  };
  auto eager = make_net();
  auto net = make_net();
  optim::AdamW eager_optimizer(eager->parameters(), 0.01);
  optim::AdamW optimizer(net->parameters(), 0.01);
  CapturedStep eager_step(
      eager, {eager_optimizer}, make(eager, eager_optimizer), always_eager());
  CapturedStep step(net, {optimizer}, make(net, optimizer));
  for (int i = 0; i < 10; ++i) {
    step({batch_of(i)});
    eager_step({batch_of(i)});
    const auto params = net->parameters();
    for (size_t p = 0; p < params.size(); ++p) {
      ASSERT_TRUE(
          torch::equal(params[p].grad(), eager->parameters()[p].grad()));
    }
  }
  EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
}

TEST_F(CapturedNetTest, RecomputationWithoutRandomNumbersIsCaptured) {
  const auto loss = [](Net& net, const at::Tensor& x) {
    const auto y = recompute(
        [&net](const at::Tensor& input) {
          return torch::gelu(net->first(input));
        },
        x);
    return net->last(y).square().mean();
  };
  Netting eager(always_eager(), 0, loss);
  Netting captured({}, 0, loss);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(
        torch::equal(captured.step({batch_of(i)}), eager.step({batch_of(i)})));
  }
  EXPECT_TRUE(captured.step.was_replayed()) << captured.step.eager_reason();
  EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
}

TEST_F(CapturedNetTest, ARateThatTheStepSetsIsUsedAtOnce) {
  auto net = make_net();
  auto plain = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  optim::AdamW plain_optimizer(plain->parameters(), 0.01);
  const auto warming_up = [](Net& model, optim::AdamW& optim) {
    return [&, count = 0](const Inputs& inputs) mutable {
      for (auto& group : optim.param_groups()) {
        group.options().set_lr(0.001 * ++count);
      }
      const auto loss = model->forward(inputs[0]).square().mean();
      loss.backward();
      optim.step();
      optim.zero_grad();
      return loss.detach();
    };
  };
  auto plain_step = warming_up(plain, plain_optimizer);
  const Warnings warnings;
  CapturedStep step(net, {optimizer}, warming_up(net, optimizer));
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(torch::equal(step({batch_of(i)}), plain_step({batch_of(i)})));
  }
  EXPECT_THAT(step.eager_reason(), HasSubstr("it changes learning rates"));
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(net->parameters()[i], plain->parameters()[i]));
  }
}

/// A rate that the step begins to change only later. (The recording that fails
/// leaves it changed, as any call of the function does.)
TEST_F(CapturedNetTest, ARateThatIsSetInTheRecordingIsRefused) {
  const auto late = [](Net& net, optim::AdamW& optimizer) {
    return [&, call = 0](const Inputs& inputs) mutable {
      if (++call > 3) {
        optimizer.param_groups().front().options().set_lr(0.5);
      }
      const auto loss = net->forward(inputs[0]).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      return loss.detach();
    };
  };
  auto net = make_net();
  auto plain = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  optim::AdamW plain_optimizer(plain->parameters(), 0.01);
  CapturedStep step(net, {optimizer}, late(net, optimizer));
  CapturedStep plain_step(
      plain, {plain_optimizer}, late(plain, plain_optimizer), always_eager());
  const Warnings warnings;
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(torch::equal(step({batch_of(i)}), plain_step({batch_of(i)})));
    if (i == 3) {
      EXPECT_THAT(step.eager_reason(), HasSubstr("changes learning rates"));
    }
  }
  EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
}

/// Autocast keeps casts of weights until it ends: neither those that a failed
/// recording left nor those from before one are used.
TEST_F(CapturedNetTest, AutocastAroundTheCallLeavesNoCasts) {
  for (const bool fails : {false, true}) {
    const auto loss = [fails](Net& net, const at::Tensor& x) {
      const auto value = net->forward(x).to(at::kFloat).square().mean();
      if (fails) {
        value.item<double>();
      }
      return value;
    };
    Netting eager(always_eager(), 0, loss);
    Netting captured({}, 0, loss);
    const auto call = [](Netting& netting, int i) {
      const auto device = test_device().type();
      at::autocast::set_autocast_enabled(device, true);
      at::autocast::increment_nesting();
      {
        const at::NoGradGuard no_grad;
        netting.net->forward(batch_of(50 + i)); // casts are kept from here on
      }
      const auto result = netting.step({batch_of(i)});
      at::autocast::decrement_nesting();
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(device, false);
      return result;
    };
    const Warnings warnings;
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(torch::equal(call(captured, i), call(eager, i)))
          << i << " fails: " << fails;
    }
    EXPECT_EQ(captured.step.was_replayed(), !fails);
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  }
}
/// The plain step, on a device that does not record.
TEST(CapturedStepOnCpu, IsThePlainStep) {
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "the device records";
  }
  Netting captured;
  for (int i = 0; i < 6; ++i) {
    captured.step({batch_of(i)});
  }
  EXPECT_FALSE(captured.step.was_replayed());
  EXPECT_THAT(captured.step.eager_reason(), HasSubstr("cannot record"));
}

} // namespace
} // namespace tessera
