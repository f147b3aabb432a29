// Steps that are recorded and replayed.
#include <tessera/optim/adagrad.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/lr_schedules.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/recompute/recompute.h>

#include <ATen/autocast_mode.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "train/captured_steps.h"
#include "train/warnings.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CapturedStepTest : public ::testing::TestWithParam<FrontEnd> {
 protected:
  const std::unique_ptr<Tapes> tapes_ = recorder();
};

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
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
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
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
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
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
    const auto reload = [](Trained<optim::AdamW>& trained) {
      const OptimizerRefs optimizers{*trained.optimizer};
      set_optimizer_state_dict(
          trained.model,
          optimizers,
          get_optimizer_state_dict(trained.model, optimizers).clone());
    };
    for (int i = 0; i < 12; ++i) {
      step({tokens(0, i)});
      eager_step({tokens(0, i)});
      if (i == 5) {
        reload(captured);
        reload(eager);
      }
    }
    EXPECT_TRUE(step.was_replayed());
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

TEST_P(CapturedStepTest, FreezingAndOtherOptionsAreOtherKinds) {
  on_ranks(1, [&](const Group&) {
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
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
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
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

/// What only sharded models have.
class CapturedUnitsTest : public CapturedStepTest {};

INSTANTIATE_TEST_SUITE_P(
    All,
    CapturedUnitsTest,
    ::testing::Values(FrontEnd::Flat, FrontEnd::Dim0),
    [](const auto& test) { return name_of(test.param); });

/// Without synchronisation a step leaves its gradients for the next, in memory
/// that no graph knows.
TEST_P(CapturedUnitsTest, MicroBatchesInCallsOfTheirOwnAreNotReplayed) {
  on_ranks(1, [&](const Group&) {
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    const auto micro_step = [](Trained<optim::AdamW>& trained) {
      return [&trained, call = 0](const Inputs& inputs) mutable {
        const bool is_last = call++ % 2 == 1;
        const auto loss = loss_of(trained.model, inputs[0]);
        loss.backward();
        if (is_last) {
          trained.optimizer->step();
          trained.optimizer->zero_grad();
        }
        return loss.detach();
      };
    };
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, micro_step(eager), always_eager());
    CapturedStep step(
        captured.model, {*captured.optimizer}, micro_step(captured));
    const Warnings warnings;
    for (int i = 0; i < 12; ++i) {
      set_requires_gradient_sync(eager.model, i % 2 == 1);
      set_requires_gradient_sync(captured.model, i % 2 == 1);
      ASSERT_TRUE(
          torch::equal(step({tokens(0, i)}), eager_step({tokens(0, i)})));
      EXPECT_FALSE(step.was_replayed());
    }
    EXPECT_THAT(step.eager_reason(), HasSubstr("Make all micro-batches"));
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

INSTANTIATE_TEST_SUITE_P(
    All,
    CapturedStepTest,
    ::testing::Values(
        FrontEnd::Flat,
        FrontEnd::Dim0,
        FrontEnd::Ddp,
        FrontEnd::Zero),
    [](const auto& test) { return name_of(test.param); });

/// A net and its AdamW, stepped by a CapturedStep around `body`, which computes
/// the loss.
struct Netting {
  using Loss = std::function<at::Tensor(Net&, const at::Tensor&)>;

  explicit Netting(
      const CapturedStepOptions& options = {},
      double dropout = 0,
      const Loss& loss =
          [](Net& model, const at::Tensor& x) {
            return model->forward(x).square().mean();
          })
      : net(make_net(dropout)),
        optimizer(net->parameters(), 0.01),
        step(
            net,
            {optimizer},
            [this, loss](const Inputs& inputs) {
              const auto value = loss(net, inputs[0]);
              value.backward();
              optimizer.step();
              optimizer.zero_grad();
              return value.detach();
            },
            options) {}

  std::vector<at::Tensor> snapshot() {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& param : net->parameters()) {
      copies.push_back(param.detach().clone());
    }
    for (const at::Tensor& buffer : net->buffers()) {
      copies.push_back(buffer.clone());
    }
    return copies;
  }

  Net net;
  optim::AdamW optimizer;
  CapturedStep step;
};

class CapturedNetTest : public ::testing::Test {
 protected:
  const std::unique_ptr<Tapes> tapes_ = recorder();
};

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

/// A mode that changes is another kind, and back again the first.
TEST_F(CapturedNetTest, EvaluationModeIsAnotherKind) {
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
TEST_F(CapturedNetTest, KeepsNoMoreGraphsThanAsked) {
  Netting captured(CapturedStepOptions().max_graphs(2));
  for (int i = 0; i < 24; ++i) {
    captured.step({batch_of(i).narrow(0, 0, 3 + i % 4)});
  }
  EXPECT_TRUE(captured.step.was_replayed());
  EXPECT_EQ(captured.step.num_graphs(), 2);
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

/// What cannot be captured: each case says why, changes nothing, and runs
/// eagerly as if nobody had tried.
struct Refusal {
  const char* name;
  std::function<at::Tensor(Net&, const at::Tensor&)> loss;
  std::vector<std::string> reason;
};

/// nonzero() in the middle of backward.
struct CountsInBackward : torch::autograd::Function<CountsInBackward> {
  static at::Tensor forward(
      torch::autograd::AutogradContext*,
      const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*,
      torch::autograd::variable_list gradients) {
    torch::nonzero(gradients[0]);
    return gradients;
  }
};

std::vector<Refusal> refusals() {
  return {
      {"item",
       [](Net& net, const at::Tensor& x) {
         const auto loss = net->forward(x).square().mean();
         EXPECT_GT(loss.item<double>(), 0);
         return loss;
       },
       {"aten::_local_scalar_dense"}},
      {"nonzero_in_backward",
       [](Net& net, const at::Tensor& x) {
         return CountsInBackward::apply(net->forward(x)).square().mean();
       },
       {"aten::nonzero"}},
      {"an_exception",
       [count = std::make_shared<int>(0)](Net& net, const at::Tensor& x) {
         if (++*count == 4) {
           throw std::runtime_error("the fourth time");
         }
         return net->forward(x).square().mean();
       },
       {"the fourth time"}},
      {"dropout_recomputed",
       [](Net& net, const at::Tensor& x) {
         const auto y = recompute(
             [&net](const at::Tensor& input) {
               return torch::dropout(net->first(input), 0.5, true);
             },
             x);
         return net->last(y).square().mean();
       },
       {"recompute", "random numbers"}},
  };
}

class CapturedRefusalTest : public ::testing::TestWithParam<Refusal> {
 protected:
  const std::unique_ptr<Tapes> tapes_ = recorder();
};

TEST_P(CapturedRefusalTest, RunsEagerlyWithOneWarningThatNamesIt) {
  const Refusal& refusal = GetParam();
  torch::manual_seed(9);
  std::vector<at::Tensor> expected;
  Netting eager(always_eager(), 0, refusal.loss);
  for (int i = 0; i < 8; ++i) {
    try {
      expected.push_back(eager.step({batch_of(i)}));
    } catch (const std::runtime_error&) { // as its loss does once
      expected.push_back(eager.step({batch_of(i)}));
    }
  }
  const auto eager_end = eager.snapshot();

  torch::manual_seed(9);
  const auto again = refusals();
  const auto same =
      std::find_if(again.begin(), again.end(), [&](const Refusal& other) {
        return std::string(other.name) == refusal.name;
      });
  Netting captured({}, 0, same->loss);
  const Warnings warnings;
  for (int i = 0; i < 8; ++i) {
    EXPECT_TRUE(torch::equal(captured.step({batch_of(i)}), expected[i])) << i;
  }
  EXPECT_TRUE(all_equal(captured.snapshot(), eager_end));
  ASSERT_EQ(warnings.texts.size(), 1);
  for (const std::string& words : refusal.reason) {
    EXPECT_THAT(warnings.texts.front(), HasSubstr(words));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    CapturedRefusalTest,
    ::testing::ValuesIn(refusals()),
    [](const auto& test) { return test.param.name; });

TEST_F(CapturedNetTest, ThrowsIfAsked) {
  Netting captured(
      CapturedStepOptions().require_capture(true),
      0,
      [](Net& net, const at::Tensor& x) {
        const auto loss = net->forward(x).square().mean();
        loss.item<double>();
        return loss;
      });
  for (int i = 0; i < 3; ++i) {
    captured.step({batch_of(i)});
  }
  const auto before = captured.snapshot();
  try {
    captured.step({batch_of(3)});
    ADD_FAILURE() << "it did not throw";
  } catch (const c10::Error& error) {
    EXPECT_THAT(
        error.what_without_backtrace(), HasSubstr("cannot be captured"));
  }
  EXPECT_TRUE(all_equal(captured.snapshot(), before));
}

/// The reason why a step with this optimizer, or around this function, is not
/// captured.
std::string reason_of(
    Net& net,
    torch::optim::Optimizer& optimizer,
    const CapturedStep::Function& function) {
  const Warnings warnings;
  CapturedStep step(net, {optimizer}, function);
  for (int i = 0; i < 5; ++i) {
    step({batch_of(i)});
  }
  EXPECT_LE(warnings.texts.size(), 1);
  return step.eager_reason();
}

template <class O>
CapturedStep::Function plain_step(Net& net, O& optimizer) {
  return [&](const Inputs& inputs) {
    const auto loss = net->forward(inputs[0]).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  };
}

TEST_F(CapturedNetTest, OptimizersThatCountOnTheHostAreNamed) {
  auto net = make_net();
  torch::optim::AdamW libtorch(net->parameters());
  EXPECT_THAT(
      reason_of(net, libtorch, plain_step(net, libtorch)),
      HasSubstr("not Tessera's"));
  optim::Adagrad adagrad(net->parameters());
  EXPECT_THAT(
      reason_of(net, adagrad, plain_step(net, adagrad)),
      HasSubstr("Adagrad uses numbers of the host"));
  optim::NamedOptimizer named(
      named_parameters(net),
      std::make_unique<optim::Adagrad>(net->parameters()));
  EXPECT_THAT(
      reason_of(net, named, plain_step(net, named)), HasSubstr("Adagrad"));
  optim::NamedOptimizer good(
      named_parameters(net), std::make_unique<optim::Adam>(net->parameters()));
  EXPECT_THAT(reason_of(net, good, plain_step(net, good)), IsEmpty());
}

TEST_F(CapturedNetTest, AScheduleInsideIsNamed) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  optim::ExponentialLR schedule(optimizer, 0.9);
  const auto step = plain_step(net, optimizer);
  EXPECT_THAT(
      reason_of(
          net,
          optimizer,
          [&](const Inputs& inputs) {
            auto loss = step(inputs);
            schedule.step();
            return loss;
          }),
      HasSubstr("it changes learning rates"));
  EXPECT_NEAR(schedule.get_last_lr().front(), 0.01 * std::pow(0.9, 5), 1e-12);
}

TEST_F(CapturedNetTest, AddingToGradientsThatAreThereIsNamed) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  EXPECT_THAT(
      reason_of(
          net,
          optimizer,
          [&](const Inputs& inputs) {
            const auto loss = net->forward(inputs[0]).square().mean();
            loss.backward(); // and nobody clears
            optimizer.step();
            return loss.detach();
          }),
      HasSubstr("adds to gradients that were there"));
}

/// A parameter that gets its first gradient late: its state is made eagerly,
/// and the step after that is captured.
TEST_F(CapturedNetTest, AFirstGradientIsNotCaptured) {
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
      EXPECT_FALSE(captured.step.was_replayed());
      EXPECT_THAT(
          captured.step.eager_reason(),
          HasSubstr("parameter's first gradient"));
    }
  }
  EXPECT_TRUE(captured.step.was_replayed()) << captured.step.eager_reason();
  EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
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

TEST_F(CapturedNetTest, AnInputThatTheStepWritesIsRefused) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  const auto inner = plain_step(net, optimizer);
  EXPECT_THAT(
      reason_of(
          net,
          optimizer,
          [&](const Inputs& inputs) {
            const auto loss = inner(inputs);
            inputs[0].add_(1);
            return loss;
          }),
      HasSubstr("writes to one of its inputs"));
}

TEST_F(CapturedNetTest, AStepInsideAStepIsRefused) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  CapturedStep inner(net, {optimizer}, plain_step(net, optimizer));
  EXPECT_THAT(
      reason_of(
          net, optimizer, [&](const Inputs& inputs) { return inner(inputs); }),
      HasSubstr("one captured step after the other"));
  inner({batch_of(0)});
  EXPECT_TRUE(inner.was_replayed()) << inner.eager_reason();
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

TEST_F(CapturedNetTest, BadOptionsAreRefused) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters());
  const auto step = plain_step(net, optimizer);
  EXPECT_THROW(
      CapturedStep(
          net, {optimizer}, step, CapturedStepOptions().warmup_steps(0)),
      c10::ValueError);
  EXPECT_THROW(
      CapturedStep(net, {optimizer}, step, CapturedStepOptions().max_graphs(0)),
      c10::ValueError);
  EXPECT_THROW(CapturedStep(net, {}, step), c10::ValueError);
  EXPECT_THROW(CapturedStep(net, {optimizer}, nullptr), c10::ValueError);
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

/// Mixed precision gathers into a buffer of another dtype, or from a cast that
/// is kept, and casts gradients. Evaluations between the steps leave units
/// gathered and casts renewed.
TEST(CapturedSharding, MixedPrecisionEqualsEagerSteps) {
  const auto tapes = recorder();
  on_ranks(1, [&](const Group&) {
    struct Trainee {
      Stack model;
      std::unique_ptr<optim::AdamW> optimizer;
    };
    const auto trainee = [&](bool keeps_casts, bool reshards) {
      auto model = make_stack();
      model->to(at::kFloat);
      shard_blocks(
          model,
          FullyShardOptions().reshard_after_forward(reshards).mp_policy(
              MixedPrecisionPolicy()
                  .param_dtype(at::kBFloat16)
                  .reduce_dtype(at::kFloat)
                  .keep_cast_shards(keeps_casts)));
      return Trainee{
          model, std::make_unique<optim::AdamW>(parameters(model), 0.01)};
    };
    const auto evaluate = [&](Trainee& trained, int step) {
      const at::NoGradGuard no_grad;
      return loss_of(trained.model, tokens(1, step));
    };
    for (const bool evaluates : {false, true}) {
      for (const bool keeps_casts : {false, true}) {
        for (const bool reshards : {false, true}) {
          auto eager = trainee(false, true);
          auto captured = trainee(keeps_casts, reshards);
          CapturedStep eager_step(
              eager.model, {*eager.optimizer}, step_of(eager), always_eager());
          CapturedStep step(
              captured.model, {*captured.optimizer}, step_of(captured));
          for (int i = 0; i < 20; ++i) {
            if (evaluates && i % 5 == 3) { // just before the capture, too
              ASSERT_TRUE(
                  torch::equal(evaluate(captured, i), evaluate(eager, i)));
            }
            ASSERT_TRUE(
                torch::equal(step({tokens(0, i)}), eager_step({tokens(0, i)})))
                << "step " << i << ", evaluates " << evaluates
                << ", keeps casts " << keeps_casts << ", reshards " << reshards;
          }
          EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
          EXPECT_TRUE(
              all_equal(parameters(captured.model), parameters(eager.model)));
        }
      }
    }
  });
}

/// A recording that fails leaves no cast behind that was recorded and not made.
TEST(CapturedSharding, AFailedCaptureLeavesNoCast) {
  const auto tapes = recorder();
  on_ranks(1, [&](const Group&) {
    struct Trainee {
      Stack model{nullptr};
      std::unique_ptr<optim::AdamW> optimizer;
    };
    const auto trainee = [&](bool keeps_casts) {
      Trainee made;
      made.model = make_stack();
      made.model->to(at::kFloat);
      shard_blocks(
          made.model,
          FullyShardOptions().mp_policy(MixedPrecisionPolicy()
                                            .param_dtype(at::kBFloat16)
                                            .keep_cast_shards(keeps_casts)));
      made.optimizer =
          std::make_unique<optim::AdamW>(parameters(made.model), 0.05);
      return made;
    };
    auto eager = trainee(false);
    auto captured = trainee(true);
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(
        captured.model, {*captured.optimizer}, [&](const Inputs& inputs) {
          const auto loss = loss_of(captured.model, inputs[0]);
          loss.item<double>(); // before anything is written
          loss.backward();
          clip(*captured.model, 0.5);
          captured.optimizer->step();
          captured.optimizer->zero_grad();
          return loss.detach();
        });
    const Warnings warnings;
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(
          torch::equal(step({tokens(0, i)}), eager_step({tokens(0, i)})))
          << "step " << i;
    }
    EXPECT_FALSE(step.was_replayed());
  });
}

} // namespace
} // namespace tessera
