// A rank whose backward reaches no parameter, or that leaves one out, is found
// where it meets the others; ranks that do different things on purpose are not.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/error.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/train/grad_scaler.h>
#include <tessera/train/gradient_accumulation.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

/// A parameter for each rank of a test, and a buffer if it is to have one.
struct BiasesImpl : torch::nn::Module {
  explicit BiasesImpl(int count, bool has_buffer = false) {
    for (int i = 0; i < count; ++i) {
      biases.push_back(
          register_parameter("bias" + std::to_string(i), torch::zeros({3})));
    }
    if (has_buffer) {
      calls = register_buffer("calls", torch::zeros({5}));
    }
  }
  at::Tensor forward(const at::Tensor& x) const {
    at::Tensor y = x;
    for (const at::Tensor& bias : biases) {
      y = (y + bias).tanh();
    }
    return y;
  }
  std::vector<at::Tensor> biases;
  at::Tensor calls;
};
TORCH_MODULE(Biases);

at::Tensor input_of(const Group& world, int step) {
  return torch::full({2, 3}, 0.1 * (world.rank() + 1) + 0.01 * step);
}

using Ddp = DistributedDataParallel<BiasesImpl>;

/// What a rank does in one step of the loop.
struct Turn {
  Biases model;
  Ddp& ddp;
  at::Tensor input;
  bool misses = false; // this rank in this step
};
using Step = std::function<void(const Turn&)>;

struct Outcome {
  int steps = 0; // that ended
  std::string error; // DisagreementError
};

/// Six steps, of which the last rank misses the backward of `missed`.
Outcome train(
    const Group& world,
    Biases model,
    Ddp& ddp,
    const Step& step,
    int missed = 2) {
  Outcome outcome;
  try {
    for (; outcome.steps < 6; ++outcome.steps) {
      const bool misses =
          outcome.steps == missed && world.rank() == world.size() - 1;
      step({model, ddp, input_of(world, outcome.steps), misses});
    }
  } catch (const DisagreementError& thrown) {
    outcome.error = thrown.what();
  }
  return outcome;
}

/// A loss that does not depend on the model has a backward all the same.
at::Tensor loss_of(const Turn& turn, bool through_handle = false) {
  const at::Tensor output =
      through_handle ? turn.ddp(turn.input) : turn.model->forward(turn.input);
  return (turn.misses ? output.detach().set_requires_grad(true) : output)
      .square()
      .sum();
}

class MissedBackwardTest
    : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  RanksOptions ranks() const {
    const auto& [backend, size] = GetParam();
    return {.size = size, .backend = backend};
  }
};

INSTANTIATE_TEST_SUITE_P(
    All,
    MissedBackwardTest,
    ::testing::Combine(
        ::testing::Values("auto", "gloo"),
        ::testing::Values(2, 4)),
    [](const auto& test) {
      return std::get<0>(test.param) + std::to_string(std::get<1>(test.param));
    });

/// "ranks 0, 1, 2" of four, all but the last.
std::string others_of(const Group& world) {
  return world.size() == 2 ? "rank 0:" : "ranks 0, 1, 2:";
}

/// The last rank is one step ahead when it meets the others.
void expect_found(const Group& world, const Outcome& outcome, int missed = 2) {
  const bool is_last = world.rank() == world.size() - 1;
  EXPECT_EQ(outcome.steps, missed + (is_last ? 1 : 0));
  const std::string steps = missed == 0 ? "0 steps" : "1 step";
  const std::string ahead = missed == 0 ? "1 step" : "2 steps";
  EXPECT_THAT(
      outcome.error,
      AllOf(
          HasSubstr("different steps"),
          HasSubstr(
              others_of(world) + " 0 forwards through the handle, " + steps +
              " of optimizers"),
          HasSubstr(
              "rank " + std::to_string(world.size() - 1) +
              ": 0 forwards through the handle, " + ahead + " of optimizers"),
          HasSubstr("reached no parameter")));
}

TEST_P(MissedBackwardTest, IsFoundWhereForwardsDoNotPassThroughTheHandle) {
  on_ranks(ranks(), [](const Group& world) {
    for (const int missed : {0, 2}) {
      Biases model(2);
      Ddp ddp(model);
      optim::SGD optimizer(model->parameters(), 0.1);
      const Step step = [&](const Turn& turn) {
        optimizer.zero_grad();
        loss_of(turn).backward();
        optimizer.step();
      };
      expect_found(world, train(world, model, ddp, step, missed), missed);
      world.barrier(); // the group can be used
    }
  });
}

TEST_P(MissedBackwardTest, IsFoundWhereARankLeavesTheBackwardOut) {
  on_ranks(ranks(), [](const Group& world) {
    Biases model(3);
    Ddp ddp(model);
    // Two optimizers for parts of the model, whose steps add up.
    optim::SGD first({model->biases[0]}, 0.1);
    optim::AdamW second({model->biases[1], model->biases[2]}, 0.1);
    const Step step = [&](const Turn& turn) {
      model->zero_grad();
      const at::Tensor loss = loss_of(turn);
      if (!turn.misses) {
        loss.backward();
      }
      first.step();
      second.step();
    };
    const Outcome outcome = train(world, model, ddp, step);
    EXPECT_THAT(
        outcome.error,
        AllOf(
            HasSubstr(others_of(world) + " 0 forwards through the handle, 2 s"),
            HasSubstr("handle, 4 steps of optimizers")));
  });
}

/// All ranks leave out the step in which one of them has an infinite loss.
TEST_P(MissedBackwardTest, IsNotSuspectedOfStepsThatAScalerSkips) {
  on_ranks(ranks(), [](const Group& world) {
    Biases model(2);
    Ddp ddp(model);
    optim::AdamW optimizer(model->parameters(), 0.1);
    GradScaler scaler;
    int number = 0;
    const Step step = [&](const Turn& turn) {
      optimizer.zero_grad();
      const bool overflows = ++number % 2 == 0 && world.rank() == 1;
      const double factor =
          overflows ? std::numeric_limits<double>::infinity() : 1;
      scaler.scale(loss_of(turn) * factor).backward();
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(scaler.skipped(), number % 2 == 0);
    };
    const Outcome outcome = train(world, model, ddp, step, /*missed=*/-1);
    EXPECT_EQ(outcome.steps, 6) << outcome.error;
  });
}

/// The handle sends buffers, which the other ranks do not expect. Nobody counts
/// steps of an optimizer of LibTorch.
TEST_P(MissedBackwardTest, IsFoundWhereTheModelHasBuffers) {
  on_ranks(ranks(), [](const Group& world) {
    const Group group = world.split(0).value(); // may be dead afterwards
    Biases model(2, /*has_buffer=*/true);
    Ddp ddp(model, DDPOptions().process_group(group));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    const Step step = [&](const Turn& turn) {
      optimizer.zero_grad();
      loss_of(turn, /*through_handle=*/true).backward();
      optimizer.step();
    };
    const Outcome outcome = train(world, model, ddp, step);
    EXPECT_THAT(
        outcome.error,
        AllOf(
            HasSubstr("ranks are at different calls"),
            HasSubstr(": all_reduce of Float"), // of those that wait already
            HasSubstr("rank " + std::to_string(world.size() - 1) + ":")));
    world.barrier(); // no rank is still in the group
  });
}

/// A rank that owns no parameter steps none, and is counted all the same.
TEST_P(MissedBackwardTest, IsNotSuspectedOfOwnersOfNothing) {
  on_ranks(ranks(), [](const Group& world) {
    for (const bool by_libtorch : {false, true}) {
      Biases model(1);
      Ddp ddp(model);
      ZeroRedundancyOptimizer optimizer(
          model->parameters(),
          by_libtorch ? optimizer_class<torch::optim::SGD>(0.1)
                      : optimizer_class<optim::SGD>(0.1));
      const Step step = [&](const Turn& turn) {
        optimizer.zero_grad();
        loss_of(turn).backward();
        optimizer.step();
      };
      const Outcome outcome = train(world, model, ddp, step, /*missed=*/-1);
      EXPECT_EQ(outcome.steps, 6) << outcome.error;
    }
  });
}

/// A rank that misses a backward, and then steps by itself, sends parameters
/// that the others do not expect.
TEST_P(MissedBackwardTest, IsFoundWithZero) {
  on_ranks(ranks(), [](const Group& world) {
    const Group group = world.split(0).value();
    Biases model(2);
    Ddp ddp(model, DDPOptions().process_group(group));
    ZeroRedundancyOptimizer optimizer(
        model->parameters(),
        optimizer_class<optim::SGD>(0.1),
        ZeroOptions().process_group(group));
    const Step step = [&](const Turn& turn) {
      optimizer.zero_grad();
      loss_of(turn).backward();
      optimizer.step();
    };
    const Outcome outcome = train(world, model, ddp, step);
    EXPECT_EQ(outcome.steps, 2);
    EXPECT_THAT(outcome.error, HasSubstr("ranks are at different calls"));
    world.barrier();
  });
}

/// A program may divide parameters among ranks by itself: the ranks have
/// different numbers of optimizers, and the last one has none.
TEST_P(MissedBackwardTest, IsNotSuspectedOfPartsOfAProgramsOwn) {
  on_ranks(ranks(), [](const Group& world) {
    Biases model(world.size());
    Ddp ddp(model);
    std::vector<std::unique_ptr<optim::SGD>> optimizers;
    const auto take = [&](int param) {
      optimizers.push_back(
          std::make_unique<optim::SGD>(std::vector{model->biases[param]}, 0.1));
    };
    const int last = world.size() - 1;
    if (world.rank() != last) {
      take(world.rank());
    }
    if (world.rank() == 0) {
      take(last);
    }
    const Step step = [&](const Turn& turn) {
      model->zero_grad();
      loss_of(turn).backward();
      for (const auto& optimizer : optimizers) {
        optimizer->step();
      }
      const at::NoGradGuard no_grad;
      for (int i = 0; i < world.size(); ++i) {
        world.broadcast(model->biases[i], i == last ? 0 : i);
      }
    };
    const Outcome outcome = train(world, model, ddp, step, /*missed=*/-1);
    EXPECT_EQ(outcome.steps, 6) << outcome.error;
  });
}

/// Without synchronisation a rank may train by itself, as often as it likes.
TEST(MissedBackwardTest, IsNotSuspectedOfLocalSteps) {
  on_ranks(2, [](const Group& world) {
    Biases model(2);
    Ddp ddp(model);
    optim::SGD optimizer(model->parameters(), 0.1);
    const Step step = [&](const Turn& turn) {
      {
        const auto held_back = turn.ddp.no_sync();
        for (int i = 0; i < 1 + world.rank(); ++i) {
          optimizer.zero_grad();
          loss_of(turn, /*through_handle=*/true).backward();
          optimizer.step();
        }
      }
      optimizer.zero_grad();
      loss_of(turn, /*through_handle=*/true).backward();
      optimizer.step();
      optimizer.step(); // twice, but alike
    };
    const Outcome outcome = train(world, model, ddp, step, /*missed=*/-1);
    EXPECT_EQ(outcome.steps, 6) << outcome.error;
  });
}

/// Where ranks have different numbers of micro-batches, some expect the last
/// one of a step, and others do not.
TEST(MissedBackwardTest, IsNotSuspectedOfUnevenAccumulation) {
  on_ranks(2, [](const Group& world) {
    Biases model(2);
    Ddp ddp(model);
    optim::SGD optimizer(model->parameters(), 0.1);
    GradientAccumulation accumulation(
        ddp, {optimizer}, GradientAccumulationOptions().steps(3));
    const auto add = [&](int batches) {
      for (int i = 0; i < batches; ++i) {
        accumulation.backward(ddp(input_of(world, i)).sum(), 2);
      }
    };
    EXPECT_NO_THROW(add(3));
    for (int epoch = 0; epoch < 2; ++epoch) {
      EXPECT_NO_THROW(add(2 - world.rank()));
      EXPECT_NO_THROW(accumulation.flush());
      EXPECT_NO_THROW(add(3));
    }
  });
}

/// Ranks with fewer inputs have made fewer steps when a Join ends, and all make
/// the same from there on.
TEST(MissedBackwardTest, IsNotSuspectedAfterAJoin) {
  on_ranks(3, [](const Group& world) {
    for (const bool with_zero : {false, true}) {
      Biases model(2);
      Ddp ddp(model);
      optim::SGD plain(model->parameters(), 0.1);
      ZeroRedundancyOptimizer zero(
          model->parameters(), optimizer_class<optim::SGD>(0.1));
      torch::optim::Optimizer& optimizer = with_zero
          ? static_cast<torch::optim::Optimizer&>(zero)
          : static_cast<torch::optim::Optimizer&>(plain);
      std::vector<Joinable*> joined{&ddp};
      if (with_zero) {
        joined.push_back(&zero);
      }
      const auto train_once = [&] {
        optimizer.zero_grad();
        model->forward(input_of(world, 0)).sum().backward();
        optimizer.step();
      };
      for (int epoch = 0; epoch < 2; ++epoch) {
        EXPECT_NO_THROW(Join::run(joined, [&] {
          for (int i = 0; i < 2 + world.rank(); ++i) {
            train_once();
          }
        }));
        EXPECT_NO_THROW(train_once());
      }
    }
  });
}

} // namespace
} // namespace tessera
