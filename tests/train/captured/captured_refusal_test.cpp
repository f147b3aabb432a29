// What cannot be captured.
#include <tessera/optim/adagrad.h>
#include <tessera/optim/adam.h>
#include <tessera/optim/lr_schedules.h>
#include <tessera/optim/named_optimizer.h>
#include <tessera/recompute/recompute.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "support/warnings.h"
#include "train/captured/captured_steps.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// What cannot be captured: each case says why, changes nothing, and runs
/// eagerly as if nobody had tried.
struct Refusal {
  const char* name;
  std::function<at::Tensor(Net&, const at::Tensor&)> loss;
  std::vector<std::string> reason;
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

class CapturedRefusalTest : public OnARecorder,
                            public ::testing::WithParamInterface<Refusal> {};

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
class CapturedObjectionTest : public OnARecorder {};

TEST_F(CapturedObjectionTest, ThrowsIfAsked) {
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

TEST_F(CapturedObjectionTest, OptimizersThatCountOnTheHostAreNamed) {
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

TEST_F(CapturedObjectionTest, AScheduleInsideIsNamed) {
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

TEST_F(CapturedObjectionTest, AddingToGradientsThatAreThereIsNamed) {
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

TEST_F(CapturedObjectionTest, AnInputThatTheStepWritesIsRefused) {
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

TEST_F(CapturedObjectionTest, AStepInsideAStepIsRefused) {
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

TEST_F(CapturedObjectionTest, BadOptionsAreRefused) {
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

/// In a replay they would lie where they lay when the step was recorded.
TEST_F(CapturedObjectionTest, UsingGradientsOfTheStepBeforeIsNamed) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  const auto reason = reason_of(net, optimizer, [&](const Inputs& inputs) {
    optimizer.step();
    optimizer.zero_grad();
    const auto loss = net->forward(inputs[0]).square().mean();
    loss.backward();
    return loss.detach();
  });
  EXPECT_THAT(reason, HasSubstr("uses gradients that were there before it"));
  EXPECT_THAT(reason, HasSubstr("adamw"));
}

/// A replay knows only the tensor that was there.
TEST_F(CapturedObjectionTest, ABufferThatForwardReplacesIsNamed) {
  struct StatefulImpl : torch::nn::Module {
    StatefulImpl()
        : hidden(register_buffer("hidden", torch::zeros({4}, test_device()))) {
      weight = register_parameter("weight", torch::ones({4}, test_device()));
    }
    at::Tensor forward(const at::Tensor& x) {
      const auto y = x * weight + hidden;
      hidden = y.mean(0).detach();
      return y;
    }
    at::Tensor& hidden; // in the module's list
    at::Tensor weight;
  };
  const auto net = std::make_shared<StatefulImpl>();
  optim::AdamW optimizer(net->parameters(), 0.01);
  const Warnings warnings;
  CapturedStep step(net, {optimizer}, [&](const Inputs& inputs) {
    const auto loss = net->forward(inputs[0]).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.detach();
  });
  for (int i = 0; i < 5; ++i) {
    step({batch_of(i)});
    EXPECT_FALSE(step.was_replayed());
  }
  EXPECT_THAT(step.eager_reason(), HasSubstr("buffer \"hidden\""));
}

/// CUDA's errors have lines of advice about other errors.
TEST_F(CapturedObjectionTest, OfAnErrorTheFirstLineIsShown) {
  auto net = make_net();
  optim::AdamW optimizer(net->parameters(), 0.01);
  const auto inner = plain_step(net, optimizer);
  const auto reason =
      reason_of(net, optimizer, [&, calls = 0](const Inputs& inputs) mutable {
        // Two attempts fail, and each is followed by an eager step.
        if (++calls == 4 || calls == 6) {
          throw std::runtime_error("the first line\nand advice");
        }
        return inner(inputs);
      });
  EXPECT_THAT(reason, HasSubstr("the first line."));
  EXPECT_THAT(reason, ::testing::Not(HasSubstr("advice")));
}

} // namespace
} // namespace tessera
