// Beyond the parity tests of summon_full_params.
#include <tessera/fsdp/fsdp.h>

#include <sstream>
#include <thread>
#include <utility>

#include "engine/schedule.h"
#include "engine/unit.h"
#include "fsdp/training.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;

class SummonTest
    : public ::testing::TestWithParam<std::tuple<int, ShardLayout>> {
 protected:
  FullyShardOptions options() const {
    return FullyShardOptions().layout(std::get<1>(GetParam()));
  }
  int size() const {
    return std::get<0>(GetParam());
  }
};

TEST_P(SummonTest, ShowsWhatThePlainModelHas) {
  on_ranks(size(), [&](const Group&) {
    auto plain = make_stack();
    auto model = make_stack();
    shard_blocks(model, options());
    auto guard = summon_full_params(*model);
    const auto theirs = plain->named_parameters();
    for (const auto& item : model->named_parameters()) {
      EXPECT_TRUE(torch::equal(item.value(), theirs[item.key()])) << item.key();
      item.value().data_ptr<double>(); // raw access is legal here
    }
    guard.close();
  });
}

TEST_P(SummonTest, EditsReachTheNextForwardOfAllRanks) {
  on_ranks(size(), [&](const Group&) {
    auto plain = make_stack();
    auto model = make_stack();
    shard_blocks(model, options());
    loss_of(model, tokens(0, 0)); // the root is Full now, and soon stale
    {
      auto guard = summon_full_params(*model);
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.mul_(1.5);
      }
      torch::nn::init::ones_(model->embed->weight);
      guard.close();
    }
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : plain->parameters()) {
        parameter.mul_(1.5);
      }
      torch::nn::init::ones_(plain->embed->weight);
    }
    torch::NoGradGuard no_grad;
    EXPECT_NEAR(
        loss_of(model, tokens(0, 1)).item<double>(),
        loss_of(plain, tokens(0, 1)).item<double>(),
        1e-12);
  });
}

TEST_P(SummonTest, WritesThroughRawPointersAreSeen) {
  on_ranks(size(), [&](const Group&) {
    auto model = make_stack();
    shard_blocks(model, options());
    unshard(*model);
    auto guard = summon_full_params(*model);
    double* raw = model->head.data_ptr<double>();
    std::fill(raw, raw + model->head.numel(), 2.0);
    guard.close();
    torch::NoGradGuard no_grad;
    EXPECT_EQ(model->head.sum().item<double>(), 2.0 * kVocabulary * kWidth);
  });
}

TEST_P(SummonTest, AForwardInsideUsesWhatIsShown) {
  on_ranks(size(), [&](const Group& world) {
    auto plain = make_stack();
    auto model = make_stack();
    shard_blocks(model, options());
    auto guard = summon_full_params(*model);
    loss_of(model, tokens(world.rank(), 0)).backward(); // local gradients
    loss_of(plain, tokens(world.rank(), 0)).backward();
    EXPECT_TRUE(torch::equal(model->head.grad(), plain->head.grad()));
    guard.close();
    for (const auto& leaf : parameters(*model)) {
      EXPECT_FALSE(leaf.grad().defined());
    }
    // Training continues afterwards.
    auto reference = train_plain(world.size());
    train_sharded(model, world.rank());
    expect_same_parameters(
        model, reference.model, world.size() == 1 ? 0 : 1e-9);
  });
}

TEST_P(SummonTest, KeepsWhatWasLoadedAndRefusesAnotherShape) {
  on_ranks(size(), [&](const Group&) {
    auto model = make_stack();
    shard_blocks(model, options());
    auto other = make_stack();
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : other->parameters()) {
        parameter.add_(1);
      }
    }
    std::stringstream file;
    torch::save(other, file);
    {
      auto guard = summon_full_params(*model);
      torch::load(model, file); // gives parameters other memory
      guard.close();
    }
    expect_same_parameters(model, other, 0);
    auto guard = summon_full_params(*model);
    model->head.set_data(torch::zeros({2}, at::kDouble));
    EXPECT_THAT(
        error_of([&] { guard.close(); }),
        HasSubstr("A sharded parameter keeps its shape and dtype"));
    expect_same_parameters(model, other, 0); // as if it had not been
  });
}

TEST_P(SummonTest, AForwardInsideAndItsBackwardOutsideIsRefused) {
  on_ranks(size(), [&](const Group& world) {
    auto model = make_stack();
    shard_blocks(model, options());
    at::Tensor loss;
    {
      auto guard = summon_full_params(*model);
      loss = loss_of(model, tokens(world.rank(), 0));
      guard.close();
    }
    // LibTorch's words: the parameter is no longer a leaf.
    EXPECT_THAT(
        error_of([&] { loss.backward(); }),
        HasSubstr("leaf variable has been moved into the graph interior"));
    loss_of(model, tokens(world.rank(), 0)).backward();
  });
}

// What the old model did since its last backward was compared with nobody, and
// its units live on where a rank keeps their graph.
TEST_P(SummonTest, AModelThatOneRankKeepsDoesNotDisturbTheNext) {
  on_ranks(size(), [&](const Group& world) {
    at::Tensor kept;
    {
      auto model = make_stack();
      shard_blocks(model, options());
      const auto loss = loss_of(model, tokens(0, 0));
      loss.backward();
      summon_full_params(*model).close();
      const torch::NoGradGuard no_grad;
      loss_of(model, tokens(0, 1));
      kept = world.rank() == world.size() - 1 ? loss : at::Tensor();
    }
    auto model = make_stack();
    shard_blocks(model, options());
    for (int step = 0; step < 3; ++step) {
      EXPECT_NO_THROW(loss_of(model, tokens(step, world.rank())).backward());
    }
  });
}

// As the engine's own threads do, which let go of a graph after backward() has
// returned.
TEST_P(SummonTest, UnitsMayDieOnAnotherThread) {
  on_ranks(size(), [&](const Group& world) {
    for (int round = 0; round < 20; ++round) {
      auto model = make_stack();
      shard_blocks(model, options());
      auto loss = loss_of(model, tokens(round, world.rank()));
      loss.backward();
      model = Stack(nullptr);
      std::thread engine([last = std::move(loss)]() mutable { last.reset(); });
      auto next = make_stack();
      shard_blocks(next, options());
      loss_of(next, tokens(round, world.rank())).backward();
      engine.join();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    SummonTest,
    ::testing::Combine(
        ::testing::Values(1, 2, 3),
        ::testing::Values(ShardLayout::Flat, ShardLayout::Dim0)),
    [](const auto& test) {
      return std::to_string(std::get<0>(test.param)) +
          (std::get<1>(test.param) == ShardLayout::Flat ? "Flat" : "Dim0");
    });

TEST(SummonErrorsTest, RejectsNestingAndOldGraphs) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    const at::Tensor loss = loss_of(model, tokens(world.rank(), 0));
    auto guard = summon_full_params(*model);
    EXPECT_THAT(
        error_of([&] { summon_full_params(*model).close(); }),
        HasSubstr(
            "Cannot manually unshard parameters when already unsharding parameters"));
    EXPECT_THAT(
        error_of([&] { loss.backward(); }), HasSubstr("Close the guard first"));
    EXPECT_THAT(
        error_of([&] { unshard(*model); }), HasSubstr("Close the guard first"));
    guard.close();
    loss_of(model, tokens(world.rank(), 1)).backward();
  });
}

TEST(SummonErrorsTest, ShardsAreNotWrittenInside) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    const auto leaves = parameters(*model);
    auto optimizer = make_adamw(leaves);
    loss_of(model, tokens(world.rank(), 0)).backward();
    auto guard = summon_full_params(*model);
    EXPECT_THAT(
        error_of([&] { optimizer.step(); }),
        HasSubstr("writes to a shard inside summon_full_params"));
    guard.close();
    optimizer.step();
  });
}

TEST(SummonErrorsTest, ATouchWhereTheShardWasKeptThrows) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    auto guard = summon_full_params(
        *model, SummonOptions().rank0_only(true).writeback(false));
    if (world.rank() == 1) {
      EXPECT_THAT(
          error_of([&] { model->embed->weight.sum(); }),
          HasSubstr("kept its shard"));
    } else {
      EXPECT_GT(model->embed->weight.abs().sum().item<double>(), 0);
    }
    guard.close();
    EXPECT_GT(model->embed->weight.abs().sum().item<double>(), 0);
  });
}

TEST(SummonErrorsTest, GradientsNeedOriginalParametersAndTheirDevice) {
  on_ranks(2, [](const Group&) {
    auto flat = make_stack();
    const FSDP model(flat);
    EXPECT_THAT(
        error_of([&] {
          summon_full_params(*model, SummonOptions().with_grads(true)).close();
        }),
        HasSubstr(
            "with_grads=True, use_orig_params=False, offload_to_cpu=False is not supported yet"));
  });
}

TEST(SummonAgainTest, ChangesOfOneRankMakeAllGatherAgain) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    unshard(*model);
    auto& schedule = *engine::Schedule::of(world);
    {
      auto guard = summon_full_params(*model);
      torch::NoGradGuard no_grad;
      if (world.rank() == 1) { // the last elements are this rank's
        model->embed->weight.view({-1})[-1] = 5.0;
      }
      guard.close();
    }
    schedule.probe_for_tests().counts = {};
    torch::NoGradGuard no_grad;
    EXPECT_EQ(model->embed->weight.view({-1})[-1].item<double>(), 5.0);
    EXPECT_EQ(schedule.probe_for_tests().counts.gathers, 1);
  });
}

TEST(SummonAgainTest, AnErrorOrAChangeOfOneCopyIsEverybodys) {
  on_ranks(4, [](const Group& world) {
    for (const int64_t shards : {1, 2}) { // whole copies, and copies of two
      auto model = make_stack();
      shard_blocks(
          model, FullyShardOptions().mesh(make_mesh({4 / shards, shards})));
      unshard(*model);
      {
        auto guard = summon_full_params(*model);
        torch::NoGradGuard no_grad;
        model->head.add_(1);
        guard.close();
      }
      torch::NoGradGuard no_grad;
      for (const auto& unit : fsdp_units(*model)) {
        EXPECT_EQ(
            unit.is_root() ? 0 : unit.sharded_numel() * shards,
            unit.allocated_numel());
      }
      auto guard = summon_full_params(*model);
      if (world.rank() == 3) {
        model->head.set_data(torch::zeros({2}, at::kDouble));
      }
      EXPECT_THAT(
          error_of([&] { guard.close(); }),
          ::testing::AnyOf(
              HasSubstr("keeps its shape and dtype"),
              HasSubstr("another rank could not keep its changes")));
    }
  });
}

/// Copies of a model that are written differently would never be equal again.
/// Raw pointers and data() leave no trace but the values.
TEST(SummonAgainTest, CopiesThatAreWrittenDifferentlyAreAnErrorByName) {
  on_ranks(4, [](const Group& world) {
    for (const auto& [shards, is_raw] : std::vector<std::pair<int64_t, bool>>{
             {1, false}, {1, true}, {2, false}, {2, true}}) {
      auto model = make_stack();
      shard_blocks(
          model, FullyShardOptions().mesh(make_mesh({4 / shards, shards})));
      auto guard = summon_full_params(*model);
      torch::NoGradGuard no_grad;
      if (world.rank() < 2) {
        (is_raw ? model->head.data() : model->head).add_(1);
      }
      EXPECT_THAT(
          error_of([&] { guard.close(); }),
          ::testing::AllOf(
              HasSubstr("parameter \"head\""),
              HasSubstr("different values into the copies of the model"),
              HasSubstr(
                  shards == 1 ? "what was written in place stays"
                              : "Nothing of this unit was written back")));
      EXPECT_EQ(
          torch::equal(model->head, make_stack()->head),
          shards > 1 || world.rank() >= 2);
    }
  });
}

/// One parameter cannot be kept; what was written into the others of its unit
/// is there where the rank has a whole copy, and every copy knows.
TEST(SummonAgainTest, AnObjectionSaysWhatBecameOfOtherWrites) {
  on_ranks(1, [](const Group&) {
    for (const bool keeps_casts : {false, true}) {
      torch::nn::Linear model(4, 2);
      const at::NoGradGuard no_grad;
      model->weight.fill_(1);
      model->bias.zero_();
      fully_shard(
          *model,
          FullyShardOptions().mp_policy(MixedPrecisionPolicy()
                                            .param_dtype(at::kBFloat16)
                                            .keep_cast_shards(keeps_casts)));
      const at::Tensor x = torch::ones({1, 4});
      EXPECT_EQ(model->forward(x).sum().item<float>(), 8);
      auto guard = summon_full_params(*model);
      model->weight.mul_(2);
      model->bias.set_data(torch::zeros({2}, at::kDouble));
      EXPECT_THAT(
          error_of([&] { guard.close(); }),
          ::testing::AllOf(
              HasSubstr("keeps its shape and dtype"),
              HasSubstr("what was written in place stays")));
      EXPECT_EQ(model->forward(x).sum().item<float>(), 16);
    }
  });
}

/// A program that means its copies to differ says so when it shards.
TEST(SummonAgainTest, CopiesMayDifferIfTheProgramSaysSo) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(
        model,
        FullyShardOptions().mesh(make_mesh({2, 1})).compare_start(false));
    auto guard = summon_full_params(*model);
    torch::NoGradGuard no_grad;
    model->head.fill_(world.rank());
    guard.close();
    EXPECT_TRUE((model->head == world.rank()).all().item<bool>());
  });
}

TEST(SummonAgainTest, NothingChangedGathersNothing) {
  on_ranks(2, [](const Group& world) {
    auto model = make_stack();
    shard_blocks(model);
    unshard(*model);
    auto& schedule = *engine::Schedule::of(world);
    schedule.probe_for_tests().counts = {};
    summon_full_params(*model).close();
    EXPECT_EQ(engine::unit_of(model->head)->state(), engine::UnitState::Full);
    model->head.sum();
    EXPECT_EQ(schedule.probe_for_tests().counts.gathers, 0);
    EXPECT_EQ(schedule.probe_for_tests().counts.summons, 1 + kDepth);
  });
}

} // namespace
} // namespace tessera
