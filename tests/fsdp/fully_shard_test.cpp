#include <tessera/error.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/summon.h>

#include <sstream>
#include <thread>

#include "engine/schedule.h"
#include "engine/unit_memory.h"
#include "fsdp/models.h"
#include "fsdp/training.h"
#include "libtorch/alias.h"
#include "libtorch/compat.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

struct Case {
  std::string backend;
  int size;
  ShardLayout layout;
};

class FullyShardTest : public ::testing::TestWithParam<Case> {
 protected:
  FullyShardOptions options() const {
    return FullyShardOptions().layout(GetParam().layout);
  }
  void run(const std::function<void(const Group&)>& body) const {
    on_ranks(
        RanksOptions{.size = GetParam().size, .backend = GetParam().backend},
        body);
  }
  /// At world size 1 the arithmetic is the plain model's: the same bits.
  double tolerance() const {
    return GetParam().size == 1 ? 0 : 1e-9;
  }
};

TEST_P(FullyShardTest, TrainingMatchesSingleProcess) {
  run([&](const Group& world) {
    auto reference = train_plain(world.size());
    auto model = make_stack();
    shard_blocks(model, options());
    auto optimizer = make_adamw(parameters(*model));
    for (int step = 0; step < kSteps; ++step) {
      auto loss = loss_of(model, tokens(world.rank(), step));
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      auto mean = loss.detach().clone().view({1});
      world.all_reduce(mean, ReduceOp::Avg);
      EXPECT_NEAR(
          mean.item<double>(),
          reference.losses[static_cast<size_t>(step)],
          1e-9);
    }
    expect_same_parameters(model, reference.model, tolerance());
  });
}

TEST_P(FullyShardTest, TiedWeightsMatchSingleProcess) {
  run([&](const Group& world) {
    auto reference = train_plain(world.size(), /*tied=*/true);
    auto model = make_stack(/*tied=*/true);
    shard_blocks(model, options());
    auto optimizer = make_adamw(parameters(*model));
    for (int step = 0; step < kSteps; ++step) {
      loss_of(model, tokens(world.rank(), step)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    expect_same_parameters(model, reference.model, tolerance());
  });
}

TEST_P(FullyShardTest, AccumulationMatchesOneLargeBatch) {
  run([&](const Group& world) {
    auto plain = make_stack();
    auto optimizer = make_adamw(plain->parameters());
    for (int step = 0; step < 2; ++step) {
      (loss_of(plain, all_tokens(world.size(), step)) / 2).backward();
    }
    optimizer.step();
    for (const bool sync_each : {true, false}) {
      auto model = make_stack();
      shard_blocks(model, options());
      auto ours = make_adamw(parameters(*model));
      set_requires_gradient_sync(*model, sync_each);
      (loss_of(model, tokens(world.rank(), 0)) / 2).backward();
      set_requires_gradient_sync(*model, true);
      (loss_of(model, tokens(world.rank(), 1)) / 2).backward();
      ours.step();
      expect_same_parameters(model, plain, tolerance() == 0 ? 1e-15 : 1e-9);
    }
  });
}

TEST_P(FullyShardTest, AccumulationGathersTheRootOnce) {
  run([&](const Group& world) {
    auto model = make_stack();
    auto plain = make_stack();
    shard_blocks(model, options());
    auto& counts = engine::Schedule::of(world)->probe_for_tests().counts;
    const auto gathers_of_backward = [&] {
      counts = {};
      loss_of(model, tokens(world.rank(), 0)).backward();
      return counts.gathers;
    };
    const int64_t all = world.size() == 1 ? 0 : 1 + 2 * kDepth;
    const int64_t blocks = world.size() == 1 ? 0 : 2 * kDepth;
    set_requires_gradient_sync(*model, false);
    EXPECT_EQ(gathers_of_backward(), all);
    EXPECT_EQ(gathers_of_backward(), blocks);
    // Whoever writes in between finds the new values in the next forward.
    for (Stack* written : {&model, &plain}) {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& param : parameters(**written)) {
        param.mul_(1.5);
      }
    }
    EXPECT_NEAR(
        loss_of(model, tokens(0, 0)).item<double>(),
        loss_of(plain, tokens(0, 0)).item<double>(),
        1e-9);
    set_requires_gradient_sync(*model, true);
    EXPECT_EQ(
        gathers_of_backward(), blocks); // the loss above gathered the root
    EXPECT_EQ(gathers_of_backward(), all);
  });
}

TEST_P(FullyShardTest, ClipGivesTheNormOfTheUnshardedGradients) {
  run([&](const Group& world) {
    auto plain = make_stack();
    loss_of(plain, all_tokens(world.size(), 0)).backward();
    auto model = make_stack();
    shard_blocks(model, options());
    loss_of(model, tokens(world.rank(), 0)).backward();
    const double expected =
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1, 2.0, true);
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1).item<double>(), expected, 1e-9);
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1).item<double>(), 0.1, 1e-5);
    const double infinity = std::numeric_limits<double>::infinity();
    const double largest =
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 1e9, infinity);
    EXPECT_NEAR(
        clip_grad_norm_(*model, 1e9, infinity).item<double>(), largest, 1e-5);
  });
}

TEST_P(FullyShardTest, IssuesExactlyTheCollectivesOfTheSchedule) {
  run([&](const Group& world) {
    auto model = make_stack();
    shard_blocks(model, options());
    auto& schedule = *engine::Schedule::of(world);
    for (int step = 0; step < 3; ++step) {
      schedule.probe_for_tests().counts = {};
      loss_of(model, tokens(world.rank(), step)).backward();
      if (world.size() == 1) { // parameters are the shards: nothing moves
        EXPECT_EQ(schedule.probe_for_tests().counts.gathers, 0);
        EXPECT_EQ(schedule.probe_for_tests().counts.reductions, 0);
        continue;
      }
      // Forward: the root and each block; backward: each block again.
      EXPECT_EQ(schedule.probe_for_tests().counts.gathers, 1 + 2 * kDepth);
      EXPECT_EQ(schedule.probe_for_tests().counts.reductions, 1 + kDepth);
      // All but the root: the last block, which is still Full when the gather
      // before it ends, is gathered ahead where backward begins.
      EXPECT_EQ(
          schedule.probe_for_tests().counts.prefetched,
          step == 0 ? 0 : 2 * kDepth);
    }
  });
}

TEST_P(FullyShardTest, HoldsNothingButShardsBetweenSteps) {
  run([&](const Group& world) {
    auto model = make_stack();
    shard_blocks(model, options());
    loss_of(model, tokens(world.rank(), 0)).backward();
    for (const auto& parameter : model->parameters()) {
      EXPECT_EQ(allocated_numel(*engine::unit_of(parameter)), 0);
      EXPECT_EQ(
          engine::unit_of(parameter)->state(), engine::UnitState::Sharded);
    }
  });
}

TEST_P(FullyShardTest, AnExceptionInForwardOrBackwardIsFollowedByAHealthyStep) {
  run([&](const Group& world) {
    auto plain = make_stack();
    auto optimizer = make_adamw(plain->parameters());
    auto model = make_stack();
    shard_blocks(model, options());
    auto ours = make_adamw(parameters(*model));
    {
      auto x = model->embed(tokens(world.rank(), 0));
      x = model->blocks[0]->as<tessera::testing::Block>()->forward(x);
      // Forward stops here; then a backward that throws in the middle.
      x.register_hook([](const at::Tensor&) -> at::Tensor {
        throw std::runtime_error("on purpose");
      });
      auto y = model->blocks[1]->as<tessera::testing::Block>()->forward(x);
      EXPECT_THROW(y.sum().backward(), std::exception);
    }
    for (auto& parameter : parameters(*model)) {
      parameter.mutable_grad().reset();
    }
    for (int step = 0; step < 2; ++step) {
      loss_of(plain, all_tokens(world.size(), step)).backward();
      optimizer.step();
      optimizer.zero_grad();
      loss_of(model, tokens(world.rank(), step)).backward();
      ours.step();
      ours.zero_grad();
    }
    expect_same_parameters(model, plain, tolerance());
  });
}

TEST_P(FullyShardTest, EvaluationSeesTheLatestStep) {
  run([&](const Group& world) {
    auto model = make_stack();
    shard_blocks(model, options());
    auto optimizer = make_adamw(parameters(*model));
    const auto evaluate = [&] {
      torch::NoGradGuard no_grad;
      return loss_of(model, tokens(0, 9)).item<double>();
    };
    const double before = evaluate();
    loss_of(model, tokens(world.rank(), 0)).backward();
    optimizer.step();
    const double after = evaluate();
    EXPECT_NE(before, after);
    c10::InferenceMode inference;
    EXPECT_EQ(loss_of(model, tokens(0, 9)).item<double>(), after);
  });
}

TEST_P(FullyShardTest, RejectsBackwardOfAStaleGraph) {
  run([&](const Group& world) {
    auto model = make_stack();
    shard_blocks(model, options());
    auto optimizer = make_adamw(parameters(*model));
    auto old = loss_of(model, tokens(world.rank(), 0));
    loss_of(model, tokens(world.rank(), 1)).backward();
    optimizer.step();
    EXPECT_THROW(old.backward(), c10::Error);
    optimizer.zero_grad();
    loss_of(model, tokens(world.rank(), 2)).backward(); // goes on
  });
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
    for (int size : {1, 2, 3, 4}) {
      cases.push_back({"shm", size, layout});
    }
    cases.push_back({"gloo", 2, layout});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    FullyShardTest,
    ::testing::ValuesIn(all_cases()),
    [](const auto& test) {
      return test.param.backend + std::to_string(test.param.size) +
          (test.param.layout == ShardLayout::Flat ? "Flat" : "Dim0");
    });

/// 3 rows, 1 row and a scalar's worth of rows on 4 ranks.
torch::nn::Sequential make_narrow() {
  torch::manual_seed(0);
  torch::nn::Sequential model(
      torch::nn::Linear(64, 1), torch::nn::Tanh(), torch::nn::Linear(1, 3));
  model->to(at::kDouble);
  return model;
}

at::Tensor narrow_loss(torch::nn::Sequential& model, int first, int last) {
  const at::Tensor all = torch::linspace(-1, 1, 4 * 64, at::kDouble);
  return model->forward(all.view({4, 64}).narrow(0, first, last - first))
      .square()
      .mean();
}

TEST(FullyShardGroupsTest, FarFewerRowsThanRanksTrainAsInThePlainModel) {
  for (const std::string backend : {"shm", "gloo"}) {
    on_ranks(
        RanksOptions{.size = 4, .backend = backend}, [](const Group& world) {
          auto plain = make_narrow();
          torch::optim::SGD plain_step(plain->parameters(), 0.1);
          auto model = make_narrow();
          fully_shard(model, FullyShardOptions().layout(ShardLayout::Dim0));
          const auto unit = engine::unit_of(model->parameters().front());
          ASSERT_EQ(
              unit->bundles().front().layout().travel(),
              engine::Layout::Travel::Whole);
          torch::optim::SGD step(parameters(model), 0.1);
          for (int i = 0; i < 3; ++i) {
            narrow_loss(plain, 0, 4).backward();
            narrow_loss(model, world.rank(), world.rank() + 1).backward();
            EXPECT_NEAR(
                clip_grad_norm_(model, 0.5).item<double>(),
                torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5),
                1e-12);
            plain_step.step();
            step.step();
            plain_step.zero_grad();
            step.zero_grad();
          }
          auto summoned = summon_full_params(model);
          for (size_t i = 0; i < plain->parameters().size(); ++i) {
            EXPECT_TRUE(torch::allclose(
                model->parameters()[i], plain->parameters()[i], 1e-12, 1e-12))
                << i;
          }
          summoned.close();
        });
  }
}

TEST(FullyShardGroupsTest, UnitsOverSeveralGroupsAreClippedTogether) {
  on_ranks(3, [](const Group& world) {
    auto plain = make_stack();
    loss_of(plain, all_tokens(world.size(), 0)).backward();
    auto model = make_stack();
    for (const auto& block : *model->blocks) { // each over a group of its own
      fully_shard(
          *block, FullyShardOptions().group(*world.split(0, world.rank())));
    }
    fully_shard(*model);
    loss_of(model, tokens(world.rank(), 0)).backward();
    const double expected =
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1, 2.0, true);
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1).item<double>(), expected, 1e-9);
  });
}

TEST(FullyShardGroupsTest, TwoModelsInTurnsAreBothGatheredAhead) {
  on_ranks(2, [](const Group& world) {
    auto first = make_stack();
    auto second = make_stack();
    shard_blocks(first);
    shard_blocks(second);
    auto& schedule = *engine::Schedule::of(world);
    for (int step = 0; step < 3; ++step) {
      for (Stack* model : {&first, &second}) {
        schedule.probe_for_tests().counts = {};
        loss_of(*model, tokens(world.rank(), step)).backward();
        EXPECT_EQ(schedule.probe_for_tests().counts.gathers, 1 + 2 * kDepth);
        EXPECT_EQ(
            schedule.probe_for_tests().counts.prefetched,
            step == 0 ? 0 : 2 * kDepth);
      }
    }
  });
}

TEST(FullyShardGroupsTest, AWriteToOneOfTwoModelsIsFoundInTheirBackward) {
  on_ranks(2, [](const Group&) {
    torch::manual_seed(0);
    const auto make = [] {
      torch::nn::Sequential model(
          torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
      for (const auto& child : model->children()) {
        fully_shard(*child);
      }
      fully_shard(*model); // its root has no parameters that backward reads
      return model;
    };
    auto first = make();
    auto second = make();
    const auto loss = [&] {
      const auto input = torch::ones({2, 3}, torch::requires_grad());
      const auto of_first = first->forward(input).sum();
      return of_first + second->forward(input).sum();
    };
    loss().backward();
    loss().backward(); // gathers ahead, from one model to the other
    const auto late = loss();
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& param : parameters(*first)) {
        param.add_(1);
      }
    }
    EXPECT_THAT(
        error_of([&] { late.backward(); }),
        HasSubstr("between this graph's forward and its backward"));
  });
}

TEST(FullyShardGroupsTest, GradientSyncIsTheModulesOwn) {
  on_ranks(2, [](const Group& world) {
    auto quiet = make_stack();
    auto other = make_stack();
    shard_blocks(quiet);
    shard_blocks(other);
    set_requires_gradient_sync(*quiet, false);
    loss_of(quiet, tokens(world.rank(), 0)).backward();
    loss_of(other, tokens(world.rank(), 0)).backward();
    const auto has_gradients = [](Stack& model) {
      const auto leaves = parameters(*model);
      return std::any_of(leaves.begin(), leaves.end(), [](const auto& leaf) {
        return leaf.grad().defined();
      });
    };
    EXPECT_FALSE(has_gradients(quiet));
    EXPECT_TRUE(has_gradients(other));
  });
}

TEST(FullyShardErrorsTest, RejectsWhatCannotBeSharded) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    EXPECT_THAT(
        error_of([&] { fully_shard(*model); }), HasSubstr("sharded already"));
    torch::nn::Module empty;
    fully_shard(empty); // legal
    torch::nn::Module meta;
    meta.register_parameter("weight", torch::empty({2}, at::kMeta));
    EXPECT_THAT(error_of([&] { fully_shard(meta); }), HasSubstr("meta device"));
    torch::nn::Module integers;
    integers.register_parameter("table", torch::zeros({2}, at::kLong), false);
    EXPECT_THAT(
        error_of([&] { fully_shard(integers); }),
        HasSubstr("parameter \"table\": Long cannot have gradients"));
    torch::nn::Linear differs(world.rank() + 2, 2);
    EXPECT_THAT(
        error_of([&] { fully_shard(*differs); }),
        AllOf(
            HasSubstr("[fully_shard]"),
            HasSubstr("rank 0: parameter \"weight\" Float [2, 2]"),
            HasSubstr("rank 1: parameter \"weight\" Float [2, 3]")));
  });
}

TEST(FullyShardErrorsTest, RejectsWritesToShardedParameters) {
  on_ranks(2, [](const Group&) {
    auto model = make_stack();
    shard_blocks(model);
    torch::NoGradGuard no_grad;
    auto weight = model->embed->weight;
    for (const auto& write : std::vector<std::function<void()>>{
             [&] { weight.add_(1); },
             [&] { torch::nn::init::zeros_(weight); },
             [&] { weight.view({-1}).fill_(0); }}) {
      EXPECT_THAT(error_of(write), HasSubstr("writes to a sharded parameter"));
    }
    EXPECT_THAT(
        error_of([&] { make_adamw(model->parameters()); }),
        HasSubstr("non-leaf"));
  });
}

/// What a user may do to a sharded model by mistake, and the errors.
TEST(FullyShardErrorsTest, EveryWayToWriteIsRefusedOrNoticed) {
  on_ranks(2, [](const Group& world) {
    const auto after = [&](const std::function<void(Stack&)>& change) {
      auto model = make_stack();
      shard_blocks(model);
      return error_of([&] {
        change(model);
        loss_of(model, tokens(world.rank(), 0)); // the next gather
      });
    };
    EXPECT_THAT(
        after([](Stack& m) { m->to(at::kFloat); }),
        HasSubstr("this replaces the data of a sharded parameter"));
    EXPECT_THAT(
        after([](Stack& m) {
          m->head.set_data(torch::zeros({kVocabulary, kWidth}, at::kDouble));
        }),
        HasSubstr("this replaces the data of a sharded parameter"));
    EXPECT_THAT(
        after([](Stack& m) {
          auto leaf = parameters(*m).front();
          leaf.set_data(torch::zeros_like(leaf));
        }),
        HasSubstr("separate a shard from its unit"));
    EXPECT_THAT(
        after([](Stack& m) { m->head.data().add_(1); }),
        HasSubstr("writes to a sharded parameter"));
    EXPECT_THAT(
        after([](Stack& m) {
          torch::NoGradGuard no_grad;
          at::mul_out(m->head, m->head, m->head);
        }),
        HasSubstr("writes to a sharded parameter"));
    EXPECT_THAT(
        after([](Stack& m) {
          std::stringstream file;
          torch::save(make_stack(), file);
          torch::load(m, file);
        }),
        HasSubstr("writes to a sharded parameter"));
  });
}

TEST(FullyShardErrorsTest, SavingWithoutGatheringThrows) {
  on_ranks(2, [](const Group&) {
    auto model = make_stack();
    shard_blocks(model);
    std::stringstream half_written;
    EXPECT_THAT(
        error_of([&] { torch::save(model, half_written); }),
        HasSubstr("[torch::save]"));
    std::stringstream file;
    auto guard = summon_full_params(*model);
    torch::save(model, file);
    guard.close();
    auto loaded = make_stack();
    torch::load(loaded, file);
    expect_same_parameters(model, loaded, 0);
  });
}

/// A gathered parameter may have the values of before the last step, or the
/// compute dtype.
TEST(FullyShardErrorsTest, SavingWhatIsGatheredThrowsToo) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](const Group& world) {
      auto model = make_stack();
      shard_blocks(model);
      auto optimizer = make_adamw(parameters(*model));
      loss_of(model, tokens(world.rank(), 0)).backward();
      {
        torch::NoGradGuard no_grad;
        loss_of(model, tokens(world.rank(), 0)); // leaves the root gathered
      }
      optimizer.step();
      std::stringstream file;
      EXPECT_THAT(
          error_of([&] { torch::save(model, file); }),
          HasSubstr("[torch::save]"));
      unshard(*model);
      EXPECT_THAT(
          error_of([&] { torch::save(model->head, file); }),
          HasSubstr("summon_full_params"));
    });
  }
}

TEST(FullyShardErrorsTest, RejectsDoubleBackwardThroughParameters) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    const auto loss = loss_of(model, tokens(world.rank(), 0));
    EXPECT_THAT(
        error_of([&] {
          loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
        }),
        HasSubstr("create_graph=true through sharded parameters"));
    // A penalty on the gradient of an input needs no second derivative of the
    // parameters' own gradients by a second backward through them.
    auto x = torch::randn({2, kWidth}, at::kDouble).requires_grad_();
    auto* block = model->blocks[0]->as<Block>();
    const auto slope = torch::autograd::grad(
        {block->forward(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    slope.square().sum().backward();
    loss_of(model, tokens(world.rank(), 1)).backward();
  });
}

TEST(FullyShardErrorsTest, AStaleGraphSaysThatTheShardChanged) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    auto optimizer = make_adamw(parameters(*model));
    const auto old = loss_of(model, tokens(world.rank(), 0));
    {
      torch::NoGradGuard no_grad;
      for (const auto& leaf : parameters(*model)) {
        leaf.add_(0.1);
      }
    }
    EXPECT_THAT(
        error_of([&] { old.backward(); }),
        HasSubstr("the shard was changed (by an optimizer step?)"));
    loss_of(model, tokens(world.rank(), 1)).backward();
  });
}

TEST(FullyShardErrorsTest, ASecondThreadIsRefused) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    auto& schedule = *engine::Schedule::of(world);
    // The observer runs in the middle of a touch: another thread comes then.
    std::string said;
    schedule.probe_for_tests().observer = [&](const engine::ShardEvent&) {
      if (said.empty()) {
        std::thread([&] {
          said = error_of([&] { model->head.sum(); });
        }).join();
      }
    };
    loss_of(model, tokens(0, 0));
    schedule.probe_for_tests().observer = nullptr;
    EXPECT_THAT(said, HasSubstr("a second thread uses this sharded model"));
  });
}

TEST(FullyShardErrorsTest, RanksThatTouchDifferentUnitsAreToldInEvaluationToo) {
  on_ranks(RanksOptions{.size = 2, .backend = "gloo"}, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model); // blocks of equal size: Gloo would mix them up
    torch::NoGradGuard no_grad;
    const std::string said = error_of([&] {
      for (int i = 0; i < 200; ++i) {
        const auto swap = world.rank() == 1 && i == 10;
        for (const int block : {0, 1, 2}) {
          model->blocks[swap ? 2 - block : block]->as<Block>()->forward(
              torch::ones({1, kWidth}, at::kDouble));
        }
      }
    });
    EXPECT_THAT(said, HasSubstr("ranks gathered or reduced different units"));
  });
}

TEST(FullyShardErrorsTest, NoticesDataThatWasReplacedBehindItsBack) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    libtorch::show(
        model->embed->weight, torch::zeros({kVocabulary, kWidth}, at::kDouble));
    EXPECT_THAT(
        error_of([&] { unshard(*model); }),
        HasSubstr("parameter \"embed.weight\": something replaced this"));
    EXPECT_THAT(
        error_of([&] { loss_of(model, tokens(world.rank(), 0)).backward(); }),
        HasSubstr("something replaced this parameter's data"));
  });
}

TEST(FullyShardErrorsTest, RawPointersToAUnitThatIsGatheredAheadThrow) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    for (int step = 0; step < 2; ++step) {
      loss_of(model, tokens(world.rank(), step)).backward();
    }
    torch::NoGradGuard no_grad;
    model->embed(tokens(0, 0)); // the root; the first block is under way
    const auto weight = model->blocks[0]->as<Block>()->up->weight;
    ASSERT_EQ(engine::unit_of(weight)->state(), engine::UnitState::Gathering);
    EXPECT_NE(
        error_of([&] { weight.data_ptr<double>(); }), "nothing was thrown");
  });
}

TEST(FullyShardErrorsTest, RawPointersOfShardedParametersThrow) {
  on_ranks(2, [](const Group&) {
    auto model = make_stack();
    shard_blocks(model);
    // Before 2.13 the storage cannot be told what to say.
    EXPECT_THAT(
        error_of([&] { model->embed->weight.data_ptr<double>(); }),
        HasSubstr(
            TESSERA_TORCH_AT_LEAST(2, 13) ? "has no memory of its own now"
                                          : "its data is not allocated yet"));
  });
}

} // namespace
} // namespace tessera
