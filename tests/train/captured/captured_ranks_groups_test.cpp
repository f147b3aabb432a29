// Captured steps of ranks that differ: groups, joins, owners of parameters.
#include <tessera/comm/mesh.h>
#include <tessera/ddp/join.h>

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

class CapturedRanksGroups : public OnSeveralRanks {};

/// In an eager step the ranks would find it. A replay would average gradients
/// of different steps.
TEST_F(CapturedRanksGroups, ARankThatReducesLessThanOthersIsNotCaptured) {
  on_ranks(2, [&](const Group& world) {
    for (const FrontEnd kind : {FrontEnd::Flat, FrontEnd::Ddp}) {
      const Tapes tapes;
      Trained<optim::AdamW> trained(kind);
      int calls = 0;
      const Warnings warnings;
      CapturedStep step(
          trained.model, {*trained.optimizer}, [&](const Inputs& inputs) {
            // Nothing is computed on rank 1, but only while it is recorded.
            if (++calls != 4 || world.rank() == 0) {
              loss_of(trained.model, inputs[0]).backward();
            }
            trained.optimizer->step();
            trained.optimizer->zero_grad();
            return at::Tensor();
          });
      for (int i = 0; i < 4; ++i) {
        step({tokens(world.rank(), i)});
        EXPECT_FALSE(step.was_replayed());
      }
      EXPECT_THAT(step.eager_reason(), HasSubstr("different collectives"));
      step({tokens(world.rank(), 5)});
      EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    }
  });
}

/// A replay ends no backward, where eager steps compare what is not sharded.
TEST_F(CapturedRanksGroups, ARootThatWasNeverShardedIsComparedBetweenReplays) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    auto model = make_stack();
    std::vector<at::Tensor> trained{model->embed->weight, model->head};
    for (const auto& block : *model->blocks) {
      fully_shard(*block);
      const auto shards = parameters(*block);
      trained.insert(trained.end(), shards.begin(), shards.end());
    }
    optim::AdamW optimizer(trained, 0.01);
    CapturedStep step(model, {optimizer}, [&](const Inputs& inputs) {
      loss_of(model, inputs[0]).backward();
      world.all_reduce(model->embed->weight.grad(), ReduceOp::Avg);
      world.all_reduce(model->head.grad(), ReduceOp::Avg);
      optimizer.step();
      optimizer.zero_grad();
      return at::Tensor();
    });
    for (int call = 1; call < 8; ++call) {
      EXPECT_NO_THROW(step({tokens(world.rank(), call)}));
      EXPECT_EQ(step.was_replayed(), call > 3) << step.eager_reason();
      if (call == 5 && world.rank() == 1) {
        const torch::NoGradGuard no_grad;
        model->head.add_(1);
      }
    }
    EXPECT_THAT(
        error_of([&] { step({tokens(world.rank(), 8)}); }),
        HasSubstr("nobody averages its gradients"));
  });
}

/// Each rank trains a model of its own.
TEST_F(CapturedRanksGroups, ModelsOfOneRankEachAreCaptured) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    auto model = make_stack();
    fully_shard(model, FullyShardOptions().group(*world.split(world.rank())));
    optim::AdamW optimizer(parameters(model), 0.01);
    CapturedStep step(model, {optimizer}, [&](const Inputs& inputs) {
      const auto loss = loss_of(model, inputs[0]);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      return loss.detach();
    });
    for (int i = 0; i < 5 + world.rank(); ++i) {
      step({tokens(world.rank(), i)});
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
  });
}

TEST_F(CapturedRanksGroups, SeveralGroupsAreNamed) {
  on_ranks(4, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> trained(FrontEnd::Ddp);
    auto other = make_net();
    const DistributedDataParallel<NetImpl> of_pair(
        other.ptr(), DDPOptions().process_group(world.split(world.rank() / 2)));
    torch::nn::ModuleList both(trained.model, other);
    const Warnings warnings;
    CapturedStep step(both, {*trained.optimizer}, step_of(trained));
    for (int i = 0; i < 5; ++i) {
      step({tokens(world.rank(), i)});
    }
    EXPECT_THAT(step.eager_reason(), HasSubstr("several groups of ranks"));
  });
}

TEST_F(CapturedRanksGroups, HybridShardingEqualsEagerSteps) {
  on_ranks(4, [&](const Group& world) {
    const Tapes tapes;
    const auto make = [&] {
      auto model = make_stack();
      shard_blocks(model, FullyShardOptions().mesh(make_mesh({2, 2})));
      return model;
    };
    auto eager = make();
    auto captured = make();
    optim::AdamW eager_optimizer(parameters(eager), 0.01);
    optim::AdamW optimizer(parameters(captured), 0.01);
    const auto function = [](Stack& model, optim::AdamW& stepped) {
      return [&](const Inputs& inputs) {
        const auto loss = loss_of(model, inputs[0]);
        loss.backward();
        stepped.step();
        stepped.zero_grad();
        return loss.detach();
      };
    };
    CapturedStep eager_step(
        eager,
        {eager_optimizer},
        function(eager, eager_optimizer),
        always_eager());
    CapturedStep step(captured, {optimizer}, function(captured, optimizer));
    for (int i = 0; i < 8; ++i) {
      const auto batch = tokens(world.rank(), i);
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_TRUE(all_equal(parameters(captured), parameters(eager)));
  });
}
class CapturedRanksJoin : public OnSeveralRanks {};

/// A rank that runs out of batches shadows eager steps.
TEST_F(CapturedRanksJoin, StepsOfAJoinAreEager) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    for (const FrontEnd kind : {FrontEnd::Ddp, FrontEnd::Zero}) {
      Trained<optim::AdamW> eager(kind);
      Trained<optim::AdamW> captured(kind);
      CapturedStep eager_step(
          eager.model, {*eager.optimizer}, step_of(eager), always_eager());
      CapturedStep step(
          captured.model,
          {*captured.optimizer},
          step_of(captured),
          CapturedStepOptions().require_capture(true)); // outside of the Join
      const auto train = [&](Trained<optim::AdamW>& trained,
                             CapturedStep& made,
                             bool is_captured) {
        const auto make = [&](int i) { made({tokens(world.rank(), i)}); };
        for (int i = 0; i < 6; ++i) {
          make(i);
        }
        EXPECT_EQ(made.was_replayed(), is_captured) << made.eager_reason();
        std::vector<Joinable*> joinables{trained.ddp.get()};
        if (auto* zero = dynamic_cast<ZeroRedundancyOptimizer*>(
                trained.optimizer.get())) {
          joinables.push_back(zero);
        }
        const Warnings warnings;
        Join::run(joinables, [&] {
          for (int i = 6; i < (world.rank() == 0 ? 11 : 8); ++i) {
            make(i);
            EXPECT_FALSE(made.was_replayed());
          }
        });
        if (is_captured) {
          EXPECT_THAT(made.eager_reason(), HasSubstr("a Join is open"));
          EXPECT_TRUE(warnings.texts.empty());
        }
        for (int i = 11; i < 14; ++i) { // the ranks agree again
          make(i);
        }
        EXPECT_EQ(made.was_replayed(), is_captured) << made.eager_reason();
      };
      train(eager, eager_step, false);
      train(captured, step, true);
      EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot())) << kind;
    }
  });
}

class CapturedRanksZero : public OnSeveralRanks {};

/// Its buckets would be made anew in the recording.
TEST_F(CapturedRanksZero, OtherParametersThatTrainAreNotLost) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    const auto make = [&](Net& net) {
      return std::make_unique<ZeroRedundancyOptimizer>(
          net->parameters(),
          optimizer_class<optim::AdamW>(0.01),
          ZeroOptions().parameters_as_bucket_view(true));
    };
    Net eager = make_net();
    Net captured = make_net();
    const auto eager_zero = make(eager);
    const auto zero = make(captured);
    const auto function = [&](Net& net, ZeroRedundancyOptimizer& optimizer) {
      return [&](const Inputs& inputs) {
        const auto loss = net->forward(inputs[0]).square().mean();
        loss.backward();
        for (const at::Tensor& param : net->parameters()) {
          if (param.grad().defined()) {
            world.all_reduce(param.grad(), ReduceOp::Avg);
          }
        }
        optimizer.step();
        optimizer.zero_grad();
        return loss.detach();
      };
    };
    CapturedStep eager_step(
        eager, {*eager_zero}, function(eager, *eager_zero), always_eager());
    CapturedStep step(captured, {*zero}, function(captured, *zero));
    const Warnings warnings;
    for (int i = 0; i < 12; ++i) {
      if (i == 6) {
        eager->first->bias.set_requires_grad(false);
        captured->first->bias.set_requires_grad(false);
      }
      const auto batch = batch_of(2 * i + world.rank());
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_TRUE(all_equal(captured->parameters(), eager->parameters()));
  });
}

} // namespace
} // namespace tessera
