// Steps of a model in each of its front ends, recorded and replayed.
#include <tessera/optim/lr_schedules.h>
#include <tessera/state/state_dict.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "support/warnings.h"
#include "train/captured/captured_steps.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests

class CapturedStepTest : public OnARecorder,
                         public ::testing::WithParamInterface<FrontEnd> {};

INSTANTIATE_TEST_SUITE_P(
    All,
    CapturedStepTest,
    ::testing::Values(
        FrontEnd::Flat,
        FrontEnd::Dim0,
        FrontEnd::Ddp,
        FrontEnd::Zero),
    [](const auto& test) { return name_of(test.param); });

/// 60 steps with a schedule, captured and not, on one rank; values and losses
/// are the same to the last bit.
template <class O>
void expect_equal_to_eager(FrontEnd kind, int steps) {
  on_ranks(1, [&](const Group&) {
    Trained<O> eager(kind, 0.05);
    Trained<O> captured(kind, 0.05);
    optim::ExponentialLR eager_schedule(*eager.optimizer, 0.99);
    optim::ExponentialLR schedule(*captured.optimizer, 0.99);
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
    for (int i = 0; i < steps; ++i) {
      const auto expected = eager_step({tokens(0, i)});
      const auto loss = step({tokens(0, i)});
      eager_schedule.step();
      schedule.step();
      ASSERT_EQ(step.was_replayed(), i >= 3) << step.eager_reason();
      ASSERT_TRUE(torch::equal(loss, expected)) << "step " << i;
    }
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
    EXPECT_EQ(step.num_graphs(), 1);
  });
}
TEST_P(CapturedStepTest, ReplaysEqualEagerStepsOfAdamW) {
  expect_equal_to_eager<optim::AdamW>(GetParam(), 60);
}

TEST_P(CapturedStepTest, ReplaysEqualEagerStepsOfSgd) {
  expect_equal_to_eager<optim::SGD>(GetParam(), 20);
}

/// And no CapturedStep at all: its eager steps are those of a plain loop.
TEST_P(CapturedStepTest, ReplaysEqualAPlainLoop) {
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "on a GPU a captured step reads float32 learning rates";
  }
  on_ranks(1, [&](const Group&) {
    Trained<optim::AdamW> plain(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    const auto plain_step = step_of(plain);
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
    for (int i = 0; i < 12; ++i) {
      plain_step({tokens(0, i)});
      step({tokens(0, i)});
    }
    EXPECT_TRUE(step.was_replayed());
    EXPECT_TRUE(all_equal(captured.snapshot(), plain.snapshot()));
  });
}

TEST_P(CapturedStepTest, AThousandReplaysEqualAThousandSteps) {
  expect_equal_to_eager<optim::AdamW>(GetParam(), 1003);
}

TEST_P(CapturedStepTest, OtherShapesAreCapturedBesideEachOther) {
  on_ranks(1, [&](const Group&) {
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    for (int i = 0; i < 16; ++i) {
      const auto batch = tokens(0, i).narrow(1, 0, i % 3 == 2 ? 3 : 5);
      EXPECT_TRUE(torch::equal(step({batch}), eager_step({batch})));
    }
    EXPECT_EQ(step.num_graphs(), 2);
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// Between replays the model is used and changed as after an eager step.
TEST_P(CapturedStepTest, TheModelIsUsedBetweenReplays) {
  on_ranks(1, [&](const Group&) {
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    const auto evaluate = [&](Trained<optim::AdamW>& trained) {
      const at::NoGradGuard no_grad;
      return loss_of(trained.model, tokens(1, 7));
    };
    for (int i = 0; i < 12; ++i) {
      step({tokens(0, i)});
      eager_step({tokens(0, i)});
      EXPECT_TRUE(torch::equal(evaluate(captured), evaluate(eager))) << i;
      if (i == 6) { // loaded in place: the same graph
        for (auto* trained : {&captured, &eager}) {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& param : parameters(trained->model)) {
            param.mul_(0.5);
          }
        }
      }
      if (i == 8) { // a step of the plain kind
        step_of(captured)({tokens(1, i)});
        step_of(eager)({tokens(1, i)});
      }
    }
    EXPECT_TRUE(step.was_replayed());
    EXPECT_EQ(step.num_graphs(), 1);
    if (test_device().is_cpu()) { // else the plain steps read other rates
      EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
    }
  });
}

/// Loading puts other tensors in the place of the optimizer's state.
TEST_P(CapturedStepTest, StateThatIsLoadedIsCapturedAnew) {
  on_ranks(1, [&](const Group&) {
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    const auto state_of = [](Trained<optim::AdamW>& trained) {
      const OptimizerRefs optimizers{*trained.optimizer};
      return get_optimizer_state_dict(trained.model, optimizers).clone();
    };
    StateDict early; // of another step than the one that loads it
    for (int i = 0; i < 12; ++i) {
      ASSERT_TRUE(
          torch::equal(step({tokens(0, i)}), eager_step({tokens(0, i)})))
          << i;
      EXPECT_EQ(step.was_replayed(), i >= 3 && i != 6) << i;
      if (i == 1) {
        early = state_of(captured);
      }
      if (i == 5) {
        EXPECT_NE(diff_state_dicts(state_of(captured), early), "");
        for (auto* trained : {&captured, &eager}) {
          const OptimizerRefs optimizers{*trained->optimizer};
          set_optimizer_state_dict(trained->model, optimizers, early.clone());
        }
      }
    }
    EXPECT_EQ(step.num_graphs(), 1);
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

TEST_P(CapturedStepTest, FreezingAndOtherOptionsAreOtherKinds) {
  on_ranks(1, [&](const Group&) {
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    for (int i = 0; i < 15; ++i) {
      if (i == 6) {
        for (auto* trained : {&captured, &eager}) {
          for (auto& group : trained->optimizer->param_groups()) {
            static_cast<optim::AdamWOptions&>(group.options())
                .weight_decay(0.3);
          }
        }
      }
      if (i == 10 && GetParam() != FrontEnd::Ddp &&
          GetParam() != FrontEnd::Zero) {
        parameters(captured.model).front().set_requires_grad(false);
        parameters(eager.model).front().set_requires_grad(false);
      }
      step({tokens(0, i)});
      eager_step({tokens(0, i)});
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_GE(step.num_graphs(), 2);
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// A step of several micro-batches is one graph.
TEST_P(CapturedStepTest, AccumulationIsOneGraph) {
  on_ranks(1, [&](const Group&) {
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    const auto accumulate = [](Trained<optim::AdamW>& trained,
                               GradientAccumulation& accumulation) {
      return [&](const Inputs& inputs) {
        at::Tensor sum;
        for (const at::Tensor& batch : inputs) {
          const auto loss = loss_of(trained.model, batch);
          accumulation.backward(loss);
          sum = sum.defined() ? sum + loss.detach() : loss.detach();
        }
        return sum;
      };
    };
    const auto options = GradientAccumulationOptions().steps(3);
    const auto eager_sums = eager.accumulate(options);
    const auto sums = captured.accumulate(options);
    CapturedStep eager_step(
        eager.model,
        {*eager.optimizer},
        accumulate(eager, *eager_sums),
        always_eager());
    CapturedStep step(
        captured.model, {*captured.optimizer}, accumulate(captured, *sums));
    for (int i = 0; i < 12; ++i) {
      const Inputs batches{tokens(0, i), tokens(1, i), tokens(2, i)};
      ASSERT_TRUE(torch::equal(step(batches), eager_step(batches)));
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// A gradient of an eager backward is not lost in a replay: that step adds to
/// it, so it is another kind, which cannot be captured.
TEST_P(CapturedStepTest, AGradientFromOutsideIsAddedTo) {
  on_ranks(1, [&](const Group&) {
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    const Warnings warnings;
    for (int i = 0; i < 9; ++i) {
      if (i == 4 || i == 6) {
        loss_of(eager.model, tokens(1, 50)).backward();
        loss_of(captured.model, tokens(1, 50)).backward();
      }
      step({tokens(0, i)});
      eager_step({tokens(0, i)});
      EXPECT_EQ(step.was_replayed(), i >= 3 && i != 4 && i != 6) << i;
    }
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

/// What an eager micro-batch left is not lost to a capture that fails.
TEST_P(CapturedStepTest, AccumulationInSeveralCallsRunsEagerly) {
  on_ranks(1, [&](const Group&) {
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    const auto options = GradientAccumulationOptions().steps(2);
    const auto eager_sums = eager.accumulate(options);
    const auto sums = captured.accumulate(options);
    const auto micro_step = [](Trained<optim::AdamW>& trained,
                               GradientAccumulation& accumulation) {
      return [&](const Inputs& inputs) {
        const auto loss = loss_of(trained.model, inputs[0]);
        accumulation.backward(loss);
        return loss.detach();
      };
    };
    CapturedStep eager_step(
        eager.model,
        {*eager.optimizer},
        micro_step(eager, *eager_sums),
        always_eager());
    CapturedStep step(
        captured.model, {*captured.optimizer}, micro_step(captured, *sums));
    const Warnings warnings;
    for (int i = 0; i < 13; ++i) {
      ASSERT_TRUE(
          torch::equal(step({tokens(0, i)}), eager_step({tokens(0, i)})))
          << i;
      EXPECT_FALSE(step.was_replayed());
    }
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

} // namespace
} // namespace tessera
