// Captured steps of several ranks, in each front end.
#include <tessera/train/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "support/warnings.h"
#include "train/captured/captured_steps.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

/// Ranks that make a step together. On the CPU each replay of the tape makes
/// their collectives; ranks that share a GPU exchange on the host and cannot
/// capture.
class CapturedRanks : public ::testing::TestWithParam<FrontEnd> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    CapturedRanks,
    ::testing::Values(
        FrontEnd::Flat,
        FrontEnd::Dim0,
        FrontEnd::Ddp,
        FrontEnd::Zero),
    [](const auto& test) { return name_of(test.param); });

TEST_P(CapturedRanks, ReplaysEqualEagerSteps) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    for (int i = 0; i < 20; ++i) {
      const auto batch = tokens(world.rank(), i);
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
      ASSERT_EQ(step.was_replayed(), i >= 3) << step.eager_reason();
      if (i == 10) { // in between a step outside, and an evaluation
        step_of(captured)({batch});
        step_of(eager)({batch});
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(torch::equal(
            loss_of(captured.model, batch), loss_of(eager.model, batch)));
      }
    }
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// A rank that meets another shape makes all capture.
TEST_P(CapturedRanks, AnotherShapeOnOneRankIsCapturedOnAll) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    for (int i = 0; i < 14; ++i) {
      const bool is_short = world.rank() == 1 && i % 4 == 1;
      const auto batch = tokens(world.rank(), i).narrow(1, 0, is_short ? 3 : 5);
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
      ASSERT_EQ(step.was_replayed(), i >= 3) << step.eager_reason();
    }
    EXPECT_EQ(step.num_graphs(), world.rank() == 1 ? 2 : 1);
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// If one rank cannot capture, none does, and every rank says why.
TEST_P(CapturedRanks, OneRankThatCannotCaptureStopsAll) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    const auto inner = step_of(captured);
    const auto plain = step_of(eager);
    const Warnings warnings;
    CapturedStep step(
        captured.model, {*captured.optimizer}, [&](const Inputs& inputs) {
          const auto loss = inner(inputs);
          if (world.rank() == 1) {
            loss.item<double>();
          }
          return loss;
        });
    for (int i = 0; i < 8; ++i) {
      EXPECT_TRUE(torch::equal(
          step({tokens(world.rank(), i)}), plain({tokens(world.rank(), i)})));
    }
    EXPECT_FALSE(step.was_replayed());
    EXPECT_THAT(step.eager_reason(), HasSubstr("on rank 1: "));
    EXPECT_EQ(warnings.texts.size(), 1);
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// Scaled losses of micro-batches, of which only the last one is reduced.
TEST_P(CapturedRanks, ScaledAccumulationEqualsEagerSteps) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    struct Trainee {
      explicit Trainee(FrontEnd kind) : trained(kind) {}

      at::Tensor operator()(const Inputs& inputs) {
        at::Tensor sum;
        for (const at::Tensor& batch : inputs) {
          const auto loss = loss_of(trained.model, batch);
          sums->backward(loss);
          sum = sum.defined() ? sum + loss.detach() : loss.detach();
        }
        return sum;
      }

      Trained<optim::AdamW> trained;
      GradScaler scaler{GradScalerOptions().init_scale(64)};
      std::unique_ptr<GradientAccumulation> sums = trained.accumulate(
          GradientAccumulationOptions().steps(2).scaler(scaler));
    };
    Trainee eager(GetParam());
    Trainee captured(GetParam());
    CapturedStep eager_step(
        eager.trained.model,
        {*eager.trained.optimizer},
        std::ref(eager),
        always_eager());
    CapturedStep step(
        captured.trained.model,
        {*captured.trained.optimizer},
        std::ref(captured));
    for (int i = 0; i < 12; ++i) {
      const Inputs batches{
          tokens(world.rank(), 2 * i), tokens(world.rank(), 2 * i + 1)};
      ASSERT_TRUE(torch::equal(step(batches), eager_step(batches))) << i;
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_TRUE(
        all_equal(captured.trained.snapshot(), eager.trained.snapshot()));
  });
}

/// Another rank's shape that cannot be captured costs this rank no graph.
TEST_P(CapturedRanks, AGraphOutlivesCapturesThatFailForOtherRanks) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> trained(GetParam());
    const auto inner = step_of(trained);
    const Warnings warnings;
    CapturedStep step(
        trained.model, {*trained.optimizer}, [&](const Inputs& inputs) {
          const auto loss = inner(inputs);
          if (inputs[0].size(1) == 3) {
            loss.item<double>();
          }
          return loss;
        });
    for (int i = 0; i < 12; ++i) {
      const bool is_short = world.rank() == 1 && (i == 5 || i == 6 || i == 8);
      step({tokens(world.rank(), i).narrow(1, 0, is_short ? 3 : 5)});
      const bool is_eager = i < 3 || i == 5 || i == 6 || i == 8;
      EXPECT_EQ(step.was_replayed(), !is_eager) << i << step.eager_reason();
    }
  });
}

/// What an evaluation gathers must not change the order of a later recording.
TEST_P(CapturedRanks, EvaluationsInBetweenChangeNoOrder) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    for (int i = 0; i < 16; ++i) {
      if (i > 3 && i % 3 == 1) {
        const at::NoGradGuard no_grad;
        loss_of(captured.model, tokens(2, i));
        loss_of(eager.model, tokens(2, i));
      }
      const bool is_short = world.rank() == 1 && (i == 5 || i == 9);
      const auto batch = tokens(world.rank(), i).narrow(1, 0, is_short ? 3 : 5);
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
      ASSERT_EQ(step.was_replayed(), i >= 3 && i != 5) // the first short one
          << i << step.eager_reason();
    }
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// nonzero() in the middle of backward, on one rank: units, gradients and
/// generators are restored on all.
TEST_P(CapturedRanks, AFailureInTheMiddleOfBackwardLeavesNoTrace) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    int recordings_left = 2; // of the captured step, that fail
    const auto function = [&](Trained<optim::AdamW>& trained, bool fails) {
      return [&trained, &world, &recordings_left, fails, calls = 0](
                 const Inputs& inputs) mutable {
        const bool is_recorded = ++calls > 3 && fails && recordings_left > 0;
        auto first = loss_of(trained.model, inputs[0]);
        if (is_recorded && world.rank() == 1) {
          first = CountsInBackward::apply(first); // after that of the second
        }
        recordings_left -= is_recorded ? 1 : 0;
        const auto loss = torch::dropout(
            first + loss_of(trained.model, inputs[0]).square(), 0.1, true);
        loss.backward();
        clip(*trained.model, 0.5);
        trained.optimizer->step();
        trained.optimizer->zero_grad();
        return loss.detach();
      };
    };
    CapturedStep eager_step(
        eager.model,
        {*eager.optimizer},
        function(eager, false),
        always_eager());
    CapturedStep step(
        captured.model, {*captured.optimizer}, function(captured, true));
    auto generator = at::globalContext().defaultGenerator(at::kCPU);
    const Warnings warnings;
    for (int i = 0; i < 9; ++i) {
      const auto batch = tokens(world.rank(), i);
      const auto start = generator.get_state().clone();
      const auto expected = eager_step({batch});
      const auto end = generator.get_state().clone();
      generator.set_state(start);
      ASSERT_TRUE(torch::equal(step({batch}), expected)) << i;
      EXPECT_TRUE(torch::equal(generator.get_state(), end)) << i;
      for (const at::Tensor& param : parameters(captured.model)) {
        EXPECT_FALSE(param.grad().defined());
      }
      EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot())) << i;
      if (i == 3) {
        EXPECT_THAT(step.eager_reason(), HasSubstr("on rank 1: "));
        EXPECT_THAT(step.eager_reason(), HasSubstr("aten::nonzero"));
      }
    }
  });
}

} // namespace
} // namespace tessera
