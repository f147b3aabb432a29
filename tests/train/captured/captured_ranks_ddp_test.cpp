// Captured steps of DistributedDataParallel.
#include <tessera/ddp/comm_hook.h>

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

class CapturedRanksDdp : public OnSeveralRanks {};

/// Buffers that forward sends from rank 0, through the handle.
TEST_F(CapturedRanksDdp, BuffersTravelInEachReplay) {
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
TEST_F(CapturedRanksDdp, AParameterWithoutAGradientIsNamed) {
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

TEST_F(CapturedRanksDdp, AHookThatComesLaterIsNotLeftOut) {
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

/// Gradients that are there when the step begins, but in the buckets.
TEST_F(CapturedRanksDdp, GradientsMayBeViewsOfBuckets) {
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

class CapturedDdpTest : public OnARecorder {};

/// Alone there is nobody to be told of it.
TEST_F(CapturedDdpTest, AnUnusedParameterOnOneRankIsCaptured) {
  on_ranks(1, [&](const Group&) {
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

/// The graph of one that is gone is of no use.
TEST_F(CapturedRanksDdp, AHandleMayBeMadeAnew) {
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
