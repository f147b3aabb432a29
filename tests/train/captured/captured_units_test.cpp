// Captured steps of sharded models.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/summon.h>
#include <tessera/state/state_dict.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "checkpoint/support.h"
#include "support/warnings.h"
#include "train/captured/captured_steps.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

/// What only sharded models have.
class CapturedUnitsTest : public OnARecorder,
                          public ::testing::WithParamInterface<FrontEnd> {};

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

class CapturedSharding : public OnARecorder {};

/// Mixed precision gathers into a buffer of another dtype, or from a cast that
/// is kept, and casts gradients. Evaluations between the steps leave units
/// gathered and casts renewed.
TEST_F(CapturedSharding, MixedPrecisionEqualsEagerSteps) {
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
          const bool is_plain = !evaluates && keeps_casts && reshards;
          const int steps = is_plain ? many_steps() : 20;
          for (int i = 0; i < steps; ++i) {
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
TEST_F(CapturedSharding, AFailedCaptureLeavesNoCast) {
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

/// Whole parameters and checkpoints after a replay are those of eager steps.
TEST_P(CapturedUnitsTest, SummonsAndSavesBetweenReplaysSeeTheNewValues) {
  on_ranks(1, [&](const Group&) {
    Twins<optim::AdamW> twins(GetParam());
    auto& [eager, captured, eager_step, step] = twins;
    const auto whole = [](Trained<optim::AdamW>& trained) {
      auto guard = summon_full_params(trained.model);
      std::vector<at::Tensor> copies;
      for (const at::Tensor& param : trained.model->parameters()) {
        copies.push_back(param.detach().clone());
      }
      guard.close();
      return copies;
    };
    const auto saved = [](Trained<optim::AdamW>& trained) {
      const OptimizerRefs optimizers{*trained.optimizer};
      return StateDict{
          {"model", get_model_state_dict(trained.model)},
          {"optimizer", get_optimizer_state_dict(trained.model, optimizers)}};
    };
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(
          torch::equal(step({tokens(0, i)}), eager_step({tokens(0, i)})));
      EXPECT_EQ(step.was_replayed(), i >= 3) << i << step.eager_reason();
      EXPECT_TRUE(all_equal(whole(captured), whole(eager))) << i;
      EXPECT_EQ(diff_state_dicts(saved(captured), saved(eager)), "") << i;
    }
    EXPECT_EQ(step.num_graphs(), 1);
  });
}

/// A save that goes on while steps are replayed has the values of its step. (A
/// tape writes past the storages by which a save on the CPU holds its memory.)
TEST_P(CapturedUnitsTest, ASaveDuringReplaysHasTheValuesOfItsStep) {
  if (test_device().is_cpu()) {
    GTEST_SKIP() << "this test wants a CUDA device";
  }
  on_ranks(1, [&](const Group& world) {
    const TempFolder folder(world);
    Trained<optim::AdamW> trained(GetParam());
    CapturedStep step(trained.model, {*trained.optimizer}, step_of(trained));
    const auto state = [&] {
      const OptimizerRefs optimizers{*trained.optimizer};
      return StateDict{
          {"model", get_model_state_dict(trained.model)},
          {"optimizer", get_optimizer_state_dict(trained.model, optimizers)}};
    };
    for (int i = 0; i < 6; ++i) {
      step({tokens(0, i)});
    }
    for (int round = 0; round < 5; ++round) {
      const StateDict expected = state().clone();
      auto saving = checkpoint::async_save(
          state(), folder / "c", checkpoint::SaveOptions().overwrite(true));
      for (int i = 0; i < 6; ++i) {
        step({tokens(0, i)});
      }
      saving.wait();
      EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
      StateDict loaded = state().clone();
      EXPECT_NE(diff_state_dicts(loaded, expected), "");
      checkpoint::load(loaded, folder / "c");
      EXPECT_EQ(diff_state_dicts(loaded, expected), "") << round;
    }
  });
}

/// A sharded module beside the model would be used as it was gathered once.
TEST_F(CapturedSharding, AnotherShardedModuleIsNamed) {
  on_ranks(1, [&](const Group&) {
    struct Trainee {
      Trainee() {
        shard_blocks(model);
        shard_blocks(teacher);
        for (const at::Tensor& param : parameters(teacher)) {
          param.set_requires_grad(false);
        }
        optimizer = std::make_unique<optim::AdamW>(parameters(model), 0.05);
      }
      at::Tensor operator()(const Inputs& inputs) {
        const auto loss = loss_of(model, inputs[0]) +
            (model->forward(inputs[0]) - teacher->forward(inputs[0]))
                .square()
                .mean();
        loss.backward();
        optimizer->step();
        optimizer->zero_grad();
        return loss.detach();
      }
      Stack model = make_stack();
      Stack teacher = make_stack();
      std::unique_ptr<optim::AdamW> optimizer;
    };
    Trainee eager;
    Trainee captured;
    Trainee both;
    const Warnings warnings;
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, std::ref(eager), always_eager());
    CapturedStep step(
        captured.model, {*captured.optimizer}, std::ref(captured));
    torch::nn::ModuleList pair(both.model, both.teacher);
    CapturedStep step_of_both(pair, {*both.optimizer}, std::ref(both));
    for (int i = 0; i < 8; ++i) {
      const auto expected = eager_step({tokens(0, i)});
      ASSERT_TRUE(torch::equal(step({tokens(0, i)}), expected)) << i;
      ASSERT_TRUE(torch::equal(step_of_both({tokens(0, i)}), expected)) << i;
      if (i == 5) { // seen by replays
        const at::NoGradGuard no_grad;
        for (Trainee* trainee : {&eager, &captured, &both}) {
          for (const at::Tensor& param : parameters(trainee->teacher)) {
            param.mul_(0.5);
          }
        }
      }
    }
    EXPECT_THAT(step.eager_reason(), HasSubstr("Pass a module that holds"));
    EXPECT_TRUE(step_of_both.was_replayed()) << step_of_both.eager_reason();
    EXPECT_TRUE(all_equal(parameters(captured.model), parameters(eager.model)));
    EXPECT_TRUE(all_equal(parameters(both.model), parameters(eager.model)));
  });
}

TEST_F(CapturedSharding, ShardsOfAnotherModelAreNamed) {
  on_ranks(1, [&](const Group&) {
    auto model = make_stack();
    auto other = make_stack();
    shard_blocks(model);
    shard_blocks(other);
    optim::AdamW optimizer(parameters(model), 0.01);
    optim::AdamW strange(parameters(other), 0.01);
    const Warnings warnings;
    CapturedStep step(model, {optimizer, strange}, [&](const Inputs& inputs) {
      const auto loss = loss_of(model, inputs[0]) + loss_of(other, inputs[0]);
      loss.backward();
      for (optim::AdamW* each : {&optimizer, &strange}) {
        each->step();
        each->zero_grad();
      }
      return loss.detach();
    });
    for (int i = 0; i < 5; ++i) {
      step({tokens(0, i)});
    }
    EXPECT_FALSE(step.was_replayed());
    EXPECT_THAT(
        step.eager_reason(), HasSubstr("not in the model of this object"));
  });
}

/// A temperature that an optimizer of its own steps.
TEST_F(CapturedSharding, PlainParametersBesideTheModelAreCaptured) {
  on_ranks(1, [&](const Group&) {
    struct Trainee {
      Trainee() {
        shard_blocks(model);
        optimizer = std::make_unique<optim::AdamW>(parameters(model), 0.01);
      }
      at::Tensor operator()(const Inputs& inputs) {
        const auto loss = loss_of(model, inputs[0]) * temperature.exp();
        loss.backward();
        optimizer->step();
        optimizer->zero_grad();
        second.step();
        second.zero_grad();
        return loss.detach();
      }
      Stack model = make_stack();
      std::unique_ptr<optim::AdamW> optimizer;
      at::Tensor temperature =
          torch::zeros({}, at::TensorOptions(test_device()).dtype(at::kDouble))
              .requires_grad_();
      optim::AdamW second{std::vector<at::Tensor>{temperature}, 0.01};
    };
    Trainee eager;
    Trainee captured;
    CapturedStep eager_step(
        eager.model,
        {*eager.optimizer, eager.second},
        std::ref(eager),
        always_eager());
    CapturedStep step(
        captured.model,
        {*captured.optimizer, captured.second},
        std::ref(captured));
    const Warnings warnings;
    for (int i = 0; i < 14; ++i) {
      for (Trainee* trainee : {&eager, &captured}) {
        if (i == 6) { // a gradient from outside: another kind
          (trainee->temperature * 3).backward();
        }
        trainee->temperature.set_requires_grad(i < 10);
      }
      ASSERT_TRUE(
          torch::equal(step({tokens(0, i)}), eager_step({tokens(0, i)})))
          << i;
      EXPECT_EQ(step.was_replayed(), i >= 3 && i != 6 && i != 10)
          << i << step.eager_reason();
    }
    EXPECT_TRUE(torch::equal(captured.temperature, eager.temperature));
    EXPECT_TRUE(all_equal(parameters(captured.model), parameters(eager.model)));
  });
}

} // namespace
} // namespace tessera
