// Captured steps of several ranks, and of DistributedDataParallel.
#include <tessera/comm/mesh.h>
#include <tessera/ddp/comm_hook.h>
#include <tessera/ddp/join.h>
#include <tessera/train/grad_scaler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "train/captured_steps.h"
#include "train/warnings.h"

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
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
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
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
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
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
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

/// Buffers that forward sends from rank 0, through the handle.
TEST(CapturedDdp, BuffersTravelInEachReplay) {
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    struct Trainee {
      Net net = make_net();
      DistributedDataParallel<NetImpl> ddp{net.ptr()};
      optim::AdamW optimizer{net->parameters(), 0.01};

      CapturedStep::Function function() {
        return [this](const Inputs& inputs) {
          const auto loss = ddp(inputs[0]).square().mean();
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          return loss.detach();
        };
      }
    };
    Trainee eager;
    Trainee captured;
    CapturedStep eager_step(
        eager.net, {eager.optimizer}, eager.function(), always_eager());
    CapturedStep step(captured.net, {captured.optimizer}, captured.function());
    for (int i = 0; i < 12; ++i) {
      const auto batch = batch_of(2 * i + world.rank());
      if (i == 3 || i == 8) { // before the capture, and before a replay
        for (Trainee* trainee : {&eager, &captured}) {
          const auto no_sync = trainee->ddp.no_sync();
          trainee->ddp(batch); // so that the next forward sends none
        }
      }
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
      ASSERT_TRUE(all_equal(captured.net->buffers(), eager.net->buffers()))
          << i;
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_EQ(step.num_graphs(), 2); // of steps that send, and that do not
    EXPECT_TRUE(all_equal(captured.net->parameters(), eager.net->parameters()));
  });
}

/// In eager steps the ranks tell each other about a parameter without a
/// gradient; a recording cannot, and says which it is.
TEST(CapturedDdp, AParameterWithoutAGradientIsNamed) {
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    auto net = make_net();
    DistributedDataParallel<NetImpl> ddp(
        net.ptr(), DDPOptions().find_unused_parameters(true));
    optim::AdamW optimizer(net->parameters(), 0.01);
    const Warnings warnings;
    CapturedStep step(net, {optimizer}, [&](const Inputs& inputs) {
      const auto loss = net->first(inputs[0]).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      return loss.detach();
    });
    for (int i = 0; i < 6; ++i) {
      step({batch_of(2 * i + world.rank())});
    }
    EXPECT_FALSE(step.was_replayed());
    EXPECT_THAT(
        step.eager_reason(),
        ::testing::AllOf(
            HasSubstr("got no gradient"), HasSubstr("\"last.weight\"")));
  });
}

/// A rank that runs out of batches shadows eager steps.
TEST(CapturedJoin, StepsOfAJoinAreEager) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    for (const FrontEnd kind : {FrontEnd::Ddp, FrontEnd::Zero}) {
      Trained<optim::AdamW> eager(kind);
      Trained<optim::AdamW> captured(kind);
      CapturedStep eager_step(
          eager.model, {*eager.optimizer}, step_of(eager), always_eager());
      CapturedStep step(
          captured.model, {*captured.optimizer}, step_of(captured));
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

TEST(CapturedDdp, AHookThatComesLaterIsNotLeftOut) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> trained(FrontEnd::Ddp);
    CapturedStep step(trained.model, {*trained.optimizer}, step_of(trained));
    const Warnings warnings;
    int calls = 0;
    for (int i = 0; i < 8; ++i) {
      if (i == 5) {
        trained.ddp->register_comm_hook(
            [&, average = allreduce_hook(world)](GradBucket& bucket) {
              ++calls;
              return average(bucket);
            });
      }
      step({tokens(world.rank(), i)});
      EXPECT_EQ(step.was_replayed(), i == 3 || i == 4) << i;
    }
    EXPECT_GE(calls, 3);
    EXPECT_THAT(step.eager_reason(), HasSubstr("communication hook"));
  });
}

/// In an eager step the ranks would find it. A replay would average gradients
/// of different steps.
TEST(CapturedGroups, ARankThatReducesLessThanOthersIsNotCaptured) {
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

/// Gradients that are there when the step begins, but in the buckets.
TEST(CapturedDdp, GradientsMayBeViewsOfBuckets) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](const Group& world) {
      const Tapes tapes;
      struct Trainee {
        Net net = make_net();
        DistributedDataParallel<NetImpl> ddp{
            net.ptr(),
            DDPOptions().gradient_as_bucket_view(true)};
        optim::AdamW optimizer{net->parameters(), 0.01};

        at::Tensor operator()(const Inputs& inputs) {
          optimizer.zero_grad();
          const auto loss = ddp(inputs[0]).square().mean();
          loss.backward();
          optimizer.step();
          return loss.detach();
        }
      };
      Trainee eager;
      Trainee captured;
      CapturedStep eager_step(
          eager.net, {eager.optimizer}, std::ref(eager), always_eager());
      CapturedStep step(captured.net, {captured.optimizer}, std::ref(captured));
      for (int i = 0; i < 10; ++i) {
        const auto batch = batch_of(2 * i + world.rank());
        ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
        ASSERT_TRUE(torch::equal(
            captured.net->last->weight.grad(), eager.net->last->weight.grad()))
            << i;
      }
      EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
      EXPECT_TRUE(
          all_equal(captured.net->parameters(), eager.net->parameters()));
    });
  }
}

/// Alone there is nobody to be told of it.
TEST(CapturedDdp, AnUnusedParameterOnOneRankIsCaptured) {
  on_ranks(1, [&](const Group&) {
    const auto tapes = recorder();
    auto net = make_net();
    DistributedDataParallel<NetImpl> ddp(
        net.ptr(), DDPOptions().find_unused_parameters(true));
    optim::AdamW optimizer(net->parameters(), 0.01);
    CapturedStep step(net, {optimizer}, [&](const Inputs& inputs) {
      const auto loss = net->first(inputs[0]).square().mean();
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      return loss.detach();
    });
    const auto before = net->last->weight.detach().clone();
    for (int i = 0; i < 6; ++i) {
      step({batch_of(i)});
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_TRUE(torch::equal(net->last->weight, before));
  });
}

/// Its buckets would be made anew in the recording.
TEST(CapturedZero, OtherParametersThatTrainAreNotLost) {
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

/// Scaled losses of micro-batches, of which only the last one is reduced.
TEST_P(CapturedRanks, ScaledAccumulationEqualsEagerSteps) {
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
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

/// Each rank trains a model of its own.
TEST(CapturedGroups, ModelsOfOneRankEachAreCaptured) {
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

TEST(CapturedGroups, SeveralGroupsAreNamed) {
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

/// Another rank's shape that cannot be captured costs this rank no graph.
TEST_P(CapturedRanks, AGraphOutlivesCapturesThatFailForOtherRanks) {
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
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
  if (!test_device().is_cpu()) {
    GTEST_SKIP() << "ranks that share a device cannot capture";
  }
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> eager(GetParam());
    Trained<optim::AdamW> captured(GetParam());
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
    for (int i = 0; i < 16; ++i) {
      if (i > 3 && i % 3 == 1) {
        const at::NoGradGuard no_grad;
        loss_of(captured.model, tokens(2, i));
        loss_of(eager.model, tokens(2, i));
      }
      const bool is_short = world.rank() == 1 && (i == 5 || i == 9);
      const auto batch = tokens(world.rank(), i).narrow(1, 0, is_short ? 3 : 5);
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
      ASSERT_EQ(step.was_replayed(), i >= 3) << i << step.eager_reason();
    }
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

TEST(CapturedGroups, HybridShardingEqualsEagerSteps) {
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

/// The graph of one that is gone is of no use.
TEST(CapturedDdp, AHandleMayBeMadeAnew) {
  on_ranks(2, [&](const Group& world) {
    const Tapes tapes;
    Trained<optim::AdamW> eager(FrontEnd::Ddp);
    Trained<optim::AdamW> captured(FrontEnd::Ddp);
    CapturedStep eager_step(
        eager.model, {*eager.optimizer}, step_of(eager), always_eager());
    CapturedStep step(captured.model, {*captured.optimizer}, step_of(captured));
    const Warnings warnings; // that the new buckets have no memory yet
    for (int i = 0; i < 10; ++i) {
      if (i == 5) {
        for (auto* trained : {&eager, &captured}) {
          trained->ddp.reset();
          trained->ddp = std::make_unique<DistributedDataParallel<StackImpl>>(
              trained->model.ptr());
        }
      }
      const auto batch = tokens(world.rank(), i);
      ASSERT_TRUE(torch::equal(step({batch}), eager_step({batch}))) << i;
    }
    EXPECT_TRUE(step.was_replayed()) << step.eager_reason();
    EXPECT_EQ(step.num_graphs(), 1);
    EXPECT_TRUE(all_equal(captured.snapshot(), eager.snapshot()));
  });
}

} // namespace
} // namespace tessera
