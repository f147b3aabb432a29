// Averages of sharded parameters, against averages of a whole model.
#include <tessera/fsdp/summon.h>
#include <tessera/train/averaged_model.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/errors.h"
#include "support/ranks.h"
#include "train/averaged.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

/// Averages of whole values, written down by hand.
struct ByHand {
  enum class Rule { Ema, Swa };
  Rule rule;
  double decay = 0;
  bool use_buffers = false;
  int64_t count = 0;
  StateDict averages;

  void update(const StateDict& values) {
    for (const auto& [name, value] : values) {
      const at::Tensor now = value.tensor();
      const bool is_buffer = value.is_of_any_rank();
      if (count == 0 || (is_buffer && !use_buffers)) {
        averages.set(name, now.clone());
        continue;
      }
      const at::Tensor before = averages.at(name).tensor();
      const auto n = static_cast<double>(count);
      const at::Tensor after = rule == Rule::Ema
          ? before * decay + now * (1 - decay)
          : before + (now - before) / (n + 1);
      averages.set(name, after.to(now.scalar_type()));
    }
    ++count;
  }
};

constexpr DiffTolerance kRounding{.rtol = 1e-13, .atol = 1e-15};

void check_averages(Kind kind, const Group& world, ByHand by_hand) {
  Model model(kind, world);
  auto options = AveragedModelOptions().use_buffers(by_hand.use_buffers);
  if (by_hand.rule == ByHand::Rule::Ema) {
    options.multi_avg_fn(get_ema_multi_avg_fn(by_hand.decay));
  }
  AveragedModel averaged(model.net, options);
  for (int step = 0; step < 5; ++step) {
    model.step(step);
    averaged.update_parameters();
    by_hand.update(model.full());
  }
  EXPECT_EQ(averaged.n_averaged(), 5);

  const StateDict own = model.full();
  const at::Tensor output = model.output(); // units are full when it is swapped
  Net whole;
  whole->to(at::kDouble);
  whole->to(test_device());
  load_state_dict(whole, by_hand.averages);
  {
    torch::NoGradGuard no_grad;
    whole->eval();
    auto swapped = averaged.swap_in();
    EXPECT_TRUE(averaged.is_swapped_in());
    EXPECT_EQ(diff_state_dicts(model.full(), by_hand.averages, kRounding), "");
    EXPECT_TRUE(torch::allclose(
        model.output(), whole->forward(Model::data(0)), 1e-12, 1e-14));
    EXPECT_FALSE(torch::equal(model.output(), output));
  }
  EXPECT_FALSE(averaged.is_swapped_in());
  EXPECT_EQ(diff_state_dicts(model.full(), own), ""); // bit by bit
  EXPECT_TRUE(torch::equal(model.output(), output));

  // Training goes on from the model's own values.
  Model other(kind, world);
  for (int step = 0; step < 6; ++step) {
    other.step(step);
  }
  model.step(5);
  EXPECT_EQ(diff_state_dicts(model.full(), other.full()), "");
}

class AveragedModelRanksTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(
    Size,
    AveragedModelRanksTest,
    ::testing::Values(1, 2, 4));

TEST_P(AveragedModelRanksTest, MatchesSingleProcess) {
  on_ranks(GetParam(), [](const Group& world) {
    for (const Kind kind : kKinds) {
      SCOPED_TRACE(static_cast<int>(kind));
      check_averages(kind, world, {ByHand::Rule::Ema, 0.75});
      check_averages(kind, world, {ByHand::Rule::Swa});
      check_averages(kind, world, {ByHand::Rule::Ema, 0.5, true});
      check_averages(kind, world, {ByHand::Rule::Swa, 0, true});
    }
  });
}

TEST(AveragedModelTest, AnExceptionSwapsBack) {
  on_ranks(2, [](const Group& world) {
    for (const Kind kind : kKinds) {
      SCOPED_TRACE(static_cast<int>(kind));
      Model model(kind, world);
      AveragedModel averaged(model.net);
      averaged.update_parameters();
      model.step(0);
      const StateDict own = model.full();
      const std::string error = error_of([&] {
        const auto swapped = averaged.swap_in();
        EXPECT_NE(diff_state_dicts(model.full(), own), "");
        model.output();
        throw std::runtime_error("evaluation failed");
      });
      EXPECT_EQ(error, "evaluation failed");
      EXPECT_EQ(diff_state_dicts(model.full(), own), "");
      EXPECT_FALSE(averaged.is_swapped_in());
    }
  });
}

TEST(AveragedModelTest, CloseEndsTheScopeOnce) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::Flat, world);
    AveragedModel averaged(model.net);
    model.step(0);
    const StateDict own = model.full();
    auto first = averaged.swap_in();
    auto swapped = std::move(first);
    swapped.close();
    swapped.close();
    first.close(); // NOLINT: was moved from, and does nothing
    EXPECT_EQ(diff_state_dicts(model.full(), own), "");
  });
}

TEST(AveragedModelTest, ACloseThatFailedCanBeTriedAgain) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::Flat, world);
    AveragedModel averaged(model.net);
    averaged.update_parameters();
    model.step(0);
    const StateDict own = model.full();
    auto swapped = averaged.swap_in();
    {
      auto summoned = summon_full_params(model.net);
      EXPECT_THAT(
          error_of([&] { swapped.close(); }), HasSubstr("summon_full_params"));
      summoned.close();
    }
    swapped.close();
    EXPECT_FALSE(averaged.is_swapped_in());
    EXPECT_EQ(diff_state_dicts(model.full(), own), "");
  });
}

TEST(AveragedModelTest, RejectsUseAtTheWrongTime) {
  on_ranks(2, [](const Group& world) {
    Model model(Kind::Flat, world);
    AveragedModel averaged(model.net);
    {
      const auto swapped = averaged.swap_in();
      const auto text = HasSubstr("Close the scope of swap_in() first.");
      EXPECT_THAT(error_of([&] { averaged.update_parameters(); }), text);
      EXPECT_THAT(error_of([&] { averaged.state_dict(); }), text);
      EXPECT_THAT(error_of([&] { auto again = averaged.swap_in(); }), text);
    }
    {
      AveragedModel other(model.net);
      {
        const auto swapped = averaged.swap_in();
        const auto text = HasSubstr("another AveragedModel has its averages");
        EXPECT_THAT(error_of([&] { other.update_parameters(); }), text);
        EXPECT_THAT(error_of([&] { auto inner = other.swap_in(); }), text);
        EXPECT_EQ(other.n_averaged(), 0);
      }
      const auto later = other.swap_in();
    }
    {
      const auto summoned = summon_full_params(model.net);
      EXPECT_THAT(
          error_of([&] { averaged.update_parameters(); }),
          HasSubstr("outside summon_full_params"));
      EXPECT_THAT(
          error_of([&] { AveragedModel inside(model.net); }),
          HasSubstr("inside summon_full_params"));
    }
    averaged.update_parameters();

    Net plain;
    AveragedModel early(plain);
    fully_shard(plain);
    EXPECT_THAT(
        error_of([&] { early.update_parameters(); }),
        HasSubstr("Make the AveragedModel after the model is sharded"));
    EXPECT_THAT(
        error_of([] { get_ema_multi_avg_fn(1.5); }),
        HasSubstr("decay is 1.5, must be from 0 to 1."));
  });
}

TEST(AveragedModelTest, KeepsNoMoreThanTheShardsOfARank) {
  on_ranks(4, [](const Group& world) {
    Model model(Kind::Flat, world);
    AveragedModel averaged(model.net);
    int64_t numel = 0;
    for (const at::Tensor& shard : parameters(model.net)) {
      numel += shard.numel();
    }
    int64_t kept = 0;
    for (const auto& [key, value] : averaged.state_dict()) {
      kept += value.is_sharded() ? value.sharded().local_numel() : 0;
    }
    EXPECT_EQ(kept, numel);
    EXPECT_LT(kept, 6 * 7 + 7 + 7 + 7 + 7 + 1);
  });
}

} // namespace
} // namespace tessera::testing
