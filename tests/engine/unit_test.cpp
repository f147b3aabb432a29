// A unit by itself, without the Schedule's decisions.
#include "engine/unit.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "engine/schedule.h"
#include "engine/unit_memory.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::engine {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

/// A unit of one parameter, (4, 3). Its face keeps the unit alive.
struct UnitOfOneParam {
  explicit UnitOfOneParam(const Group& world)
      : face(torch::ones({4, 3}, torch::requires_grad())),
        unit(Schedule::of(world)->add_unit(
            "unit",
            0,
            {{"weight", face}},
            {.all = world, .shard = world},
            {})) {}

  at::Tensor leaf() const {
    return unit->params().leaves().front();
  }
  /// Gradients of this value from every rank, averaged.
  UnitGradients::Reduction reduce(double value) const {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients{torch::full({4, 3}, value)};
    EXPECT_TRUE(unit->gradients().add(std::move(gradients)));
    EXPECT_TRUE(unit->gradients().has_waiting());
    unit->gradients().start_reduction();
    EXPECT_TRUE(unit->gradients().is_reducing());
    auto reduction = unit->gradients().finish_reduction();
    EXPECT_FALSE(unit->gradients().is_reducing());
    return reduction;
  }

  at::Tensor face;
  std::shared_ptr<Unit> unit;
};

TEST(UnitTest, TellsWhetherItStartedAGatherAndWhetherItFreed) {
  on_ranks(2, [](const Group& world) {
    const UnitOfOneParam param(world);
    Unit& unit = *param.unit;
    EXPECT_EQ(unit.state(), UnitState::Sharded);
    EXPECT_FALSE(unit.reshard());
    EXPECT_TRUE(unit.start_gather());
    EXPECT_FALSE(unit.start_gather());
    EXPECT_EQ(unit.state(), UnitState::Gathering);
    unit.finish_gather();
    EXPECT_EQ(unit.state(), UnitState::Full);
    EXPECT_GE(allocated_numel(unit), 12); // with padding
    EXPECT_TRUE(unit.reshard());
    EXPECT_FALSE(unit.reshard());
    EXPECT_EQ(allocated_numel(unit), 0);
  });
}

TEST(UnitTest, IsStaleAfterAWrite) {
  on_ranks(2, [](const Group& world) {
    const UnitOfOneParam param(world);
    Unit& unit = *param.unit;
    param.unit->count_write();
    EXPECT_FALSE(unit.is_stale()); // not gathered yet
    unit.start_gather();
    unit.finish_gather();
    EXPECT_FALSE(unit.is_stale());
    unit.count_write();
    EXPECT_TRUE(unit.is_stale());
    unit.reshard();
  });
}

TEST(UnitTest, AReductionEndsInTheGradientOfTheLeaf) {
  on_ranks(2, [](const Group& world) {
    const UnitOfOneParam param(world);
    const auto reduction = param.reduce(world.rank());
    EXPECT_EQ(reduction.used, std::vector<bool>{true});
    EXPECT_EQ(reduction.failure, nullptr);
    EXPECT_TRUE(
        torch::equal(param.leaf().grad(), torch::full_like(param.leaf(), 0.5)));
    param.reduce(1); // is added
    EXPECT_TRUE(
        torch::equal(param.leaf().grad(), torch::full_like(param.leaf(), 1.5)));
  });
}

TEST(UnitTest, HandsOverWhatAHookThrew) {
  on_ranks(2, [](const Group& world) {
    const UnitOfOneParam param(world);
    param.leaf().register_hook([](const at::Tensor&) -> at::Tensor {
      throw std::runtime_error("of the user");
    });
    const auto reduction = param.reduce(1);
    ASSERT_NE(reduction.failure, nullptr);
    EXPECT_THAT(
        error_of([&] { std::rethrow_exception(reduction.failure); }),
        HasSubstr("of the user"));
    EXPECT_TRUE(param.leaf().grad().defined());
  });
}

TEST(UnitTest, ZerosStandInUntilTheRanksHaveCompared) {
  on_ranks(2, [](const Group& world) {
    const UnitOfOneParam param(world);
    const at::NoGradGuard no_grad;
    UnitGradients& gradients = param.unit->gradients();
    for (const bool used_by_any : {true, false}) {
      gradients.add(std::vector<at::Tensor>(1)); // nobody has one
      gradients.start_reduction();
      EXPECT_EQ(gradients.finish_reduction().used, std::vector<bool>{false});
      EXPECT_TRUE(param.leaf().grad().defined());
      gradients.drop_unused({used_by_any});
      EXPECT_EQ(param.leaf().grad().defined(), used_by_any);
      param.leaf().mutable_grad().reset();
    }
  });
}

TEST(UnitTest, IsForgottenWhenItDies) {
  on_ranks(2, [](const Group& world) {
    const auto schedule = Schedule::of(world);
    auto first = std::make_unique<UnitOfOneParam>(world);
    schedule->gather(*first->unit);
    EXPECT_EQ(schedule->probe_for_tests().counts.gathers, 1);
    first.reset();
    schedule->recover(); // would follow the pointer
    const UnitOfOneParam second(world); // and its number is free
    schedule->gather(*second.unit);
    EXPECT_EQ(schedule->probe_for_tests().counts.gathers, 2);
    schedule->reshard(*second.unit);
  });
}

} // namespace
} // namespace tessera::engine
