// Which steps are of one kind, and when a kind is captured.
#include <tessera/optim/one_cycle_lr.h>
#include <tessera/train/monitor.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "support/warnings.h"
#include "train/captured/captured_steps.h"
#include "train/captured/step_cache.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

class CapturedKindsTest : public OnARecorder {};

/// A mode that changes is another kind, and back again the first.
TEST_F(CapturedKindsTest, EvaluationModeIsAnotherKind) {
  Netting eager(always_eager());
  Netting captured;
  for (int i = 0; i < 15; ++i) {
    captured.net->norm->train(i % 3 != 0);
    eager.net->norm->train(i % 3 != 0);
    EXPECT_TRUE(
        torch::equal(captured.step({batch_of(i)}), eager.step({batch_of(i)})));
  }
  EXPECT_EQ(captured.step.num_graphs(), 2);
  EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
}

/// The oldest graph makes room.
TEST_F(CapturedKindsTest, KeepsNoMoreGraphsThanAsked) {
  Netting captured(CapturedStepOptions().max_graphs(2));
  for (int i = 0; i < 24; ++i) {
    captured.step({batch_of(i).narrow(0, 0, 3 + i % 4)});
  }
  EXPECT_TRUE(captured.step.was_replayed());
  EXPECT_EQ(captured.step.num_graphs(), 2);
}

/// A parameter that gets its first gradient late: its state is made by the
/// first step of that kind, and the next one is captured.
TEST_F(CapturedKindsTest, AFirstGradientIsNotCaptured) {
  const auto loss = [](Net& net, const at::Tensor& x) {
    const auto hidden = net->first(x);
    return (x.size(0) == 5 ? net->last(hidden) : hidden).square().mean();
  };
  Netting eager(always_eager(), 0, loss);
  Netting captured({}, 0, loss);
  const Warnings warnings;
  for (int i = 0; i < 12; ++i) {
    const auto x = batch_of(i).narrow(0, 0, i >= 6 ? 5 : 6);
    captured.step({x});
    eager.step({x});
    if (i == 6) {
      EXPECT_THAT(
          captured.step.eager_reason(), HasSubstr("first step of its kind"));
    }
    // The state has been made by then, so all places are new to step 7.
    EXPECT_EQ(captured.step.was_replayed(), i >= 3 && i != 6 && i != 7) << i;
  }
  EXPECT_TRUE(warnings.texts.empty());
  EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
}

TEST_F(CapturedKindsTest, ANewShapeRunsOnceBeforeItIsCaptured) {
  Netting captured(CapturedStepOptions().require_capture(true));
  for (int i = 0; i < 12; ++i) {
    captured.step({batch_of(i).narrow(0, 0, i < 6 ? 6 : 4)});
    EXPECT_EQ(captured.step.was_replayed(), i >= 3 && i != 6) << i;
  }
}

/// A layer that is thawed gets its state eagerly, though captures are required.
TEST_F(CapturedKindsTest, AThawedLayerIsCapturedAgain) {
  Netting eager(always_eager());
  Netting captured(CapturedStepOptions().require_capture(true));
  for (int i = 0; i < 12; ++i) {
    for (Netting* netting : {&eager, &captured}) {
      netting->net->last->bias.set_requires_grad(i >= 6);
      netting->step({batch_of(i)});
    }
  }
  EXPECT_TRUE(captured.step.was_replayed()) << captured.step.eager_reason();
  EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
}

/// What a module makes once is made in an eager step.
TEST_F(CapturedKindsTest, ATableThatIsCachedIsNotMadeInARecording) {
  const auto caching = [] {
    return [tables = std::make_shared<std::map<int64_t, at::Tensor>>()](
               Net& net, const at::Tensor& x) {
      auto& table = (*tables)[x.size(0)];
      if (!table.defined()) {
        table = torch::arange(1, x.size(0) + 1, at::TensorOptions(x.device()))
                    .to(at::kFloat)
                    .unsqueeze(1);
      }
      const auto y = (net->last(net->first(x)) * table).square().mean();
      if (x.size(0) == 3) {
        y.item<float>(); // so it is never captured
      }
      return y;
    };
  };
  Netting eager(always_eager(), 0, caching());
  Netting captured({}, 0, caching());
  const Warnings warnings;
  for (int i = 0; i < 30; ++i) {
    const auto x = batch_of(i).narrow(0, 0, 3 + i % 4);
    ASSERT_TRUE(torch::equal(captured.step({x}), eager.step({x}))) << i;
  }
  EXPECT_EQ(captured.step.num_graphs(), 3);
}

/// As OneCycleLR does with its momentum.
TEST_F(CapturedKindsTest, AnOptionThatChangesInEachCallIsNamed) {
  Netting captured(CapturedStepOptions().require_capture(true));
  optim::OneCycleLR schedule(
      captured.optimizer, optim::OneCycleLROptions(0.02).total_steps(40));
  const Warnings warnings;
  for (int i = 0; i < 20; ++i) {
    captured.step({batch_of(i)});
    schedule.step();
    EXPECT_FALSE(captured.step.was_replayed());
  }
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_THAT(warnings.texts.front(), HasSubstr("the option \"betas\""));
  EXPECT_THAT(warnings.texts.front(), HasSubstr("cycle_momentum(false)"));
}

TEST_F(CapturedKindsTest, ShapesThatAreNewInEachCallAreNamed) {
  Netting captured;
  const Warnings warnings;
  for (int i = 0; i < 120; ++i) {
    captured.step({torch::ones({2 + i, 4}, test_device())});
    EXPECT_FALSE(captured.step.was_replayed());
  }
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_THAT(warnings.texts.front(), HasSubstr("the shape of an input"));
  EXPECT_THAT(warnings.texts.front(), HasSubstr("Pad batches"));
}

TEST_F(CapturedKindsTest, KindsThatWereUsedLongAgoAreForgotten) {
  train::StepCache cache(CapturedStepOptions().max_graphs(1));
  auto find = [&, call = 0](int kind) mutable -> train::KnownKind& {
    const train::StepKind step{.bytes = std::to_string(kind), .parts = {}};
    return cache.find(step, ++call, 1, 1, /*warns=*/false);
  };
  for (int kind = 0; kind < 500; ++kind) {
    ++find(kind).calls;
    EXPECT_EQ(find(kind).calls, 1);
  }
  EXPECT_EQ(find(450).calls, 1);
  EXPECT_EQ(find(0).calls, 0);
}

/// Switches of the whole process, which a graph has frozen.
TEST_F(CapturedKindsTest, AGlobalSwitchIsPartOfTheKind) {
  Netting captured;
  for (int i = 0; i < 10; ++i) {
    at::globalContext().setBenchmarkCuDNN(i >= 5);
    captured.step({batch_of(i)});
    EXPECT_EQ(captured.step.was_replayed(), i >= 3 && i != 5) << i;
  }
  at::globalContext().setBenchmarkCuDNN(false);
  EXPECT_EQ(captured.step.num_graphs(), 2);
}

/// A replay shows nothing of its parts, and a recording would only note the
/// events that time them.
TEST_F(CapturedKindsTest, AStepThatATimelineWatchesIsEager) {
  Netting captured(CapturedStepOptions().require_capture(true));
  StepMonitor monitor(captured.net, {captured.optimizer});
  const Warnings warnings;
  for (int i = 0; i < 10; ++i) {
    const bool is_watched = i == 3 || i == 6; // the capture, and a replay
    monitor.begin_step(MonitorOptions().timeline(is_watched));
    captured.step({batch_of(i)});
    EXPECT_EQ(monitor.end_step().spans.empty(), !is_watched);
    EXPECT_EQ(captured.step.was_replayed(), i >= 4 && !is_watched) << i;
    if (is_watched) {
      EXPECT_THAT(
          captured.step.eager_reason(), HasSubstr("a timeline watches"));
    }
  }
  EXPECT_TRUE(warnings.texts.empty());
}

/// Memory may be short once.
TEST_F(CapturedKindsTest, AStepThatCouldNotBeCapturedIsTriedAgainMuchLater) {
  bool fails = true;
  Netting captured({}, 0, [&](Net& net, const at::Tensor& x) {
    const auto loss = net->first(x).square().mean();
    if (fails) {
      loss.item<float>();
    }
    return loss;
  });
  const Warnings warnings;
  int num_eager = 0;
  for (int i = 0; i < 600; ++i) {
    fails = i < 10;
    captured.step({batch_of(i % 10)});
    num_eager += captured.step.was_replayed() ? 0 : 1;
  }
  EXPECT_TRUE(captured.step.was_replayed()) << captured.step.eager_reason();
  EXPECT_GT(num_eager, 400);
  EXPECT_EQ(warnings.texts.size(), 1);
}

} // namespace
} // namespace tessera
