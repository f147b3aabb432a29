// How the use of a parameter is noticed.
#include "engine/first_touch.h"

#include <torch/types.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/raw_access.h"
#include "engine/schedule.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::engine {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

/// A unit of one parameter, (3, 3), that is trained by the ranks of a group.
struct OneParam {
  explicit OneParam(
      const Group& group,
      int number = 0,
      const UnitOptions& options = {})
      : values(torch::arange(9.).view({3, 3}) + 10 * number),
        face(values.clone().set_requires_grad(true)),
        unit(Schedule::of(group)->add_unit(
            "unit" + std::to_string(number),
            number,
            {{"weight", face}},
            {.all = group, .shard = group},
            options)) {}

  UnitState state() const {
    return unit->state();
  }
  at::Tensor leaf() const {
    return unit->params().leaves().front();
  }
  void reshard() const {
    unit->schedule().reshard(*unit);
  }

  const at::Tensor values;
  at::Tensor face;
  std::shared_ptr<Unit> unit;
};

TEST(FirstTouchTest, AnOperatorThatReadsAFaceGathersItsUnit) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    EXPECT_EQ(param.state(), UnitState::Sharded);
    EXPECT_TRUE(torch::equal(param.face + 1, param.values + 1));
    EXPECT_EQ(param.state(), UnitState::Full);
  });
}

TEST(FirstTouchTest, AViewOfAFaceGathersItsUnitToo) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    const at::Tensor view = param.face.t()[1];
    param.reshard();
    EXPECT_TRUE(torch::equal(view * 2, param.values.t()[1] * 2));
    EXPECT_EQ(param.state(), UnitState::Full);
  });
}

TEST(FirstTouchTest, OneOperatorGathersAllItsUnitsTogether) {
  on_ranks(2, [](const Group& world) {
    const OneParam first(world, 0);
    const OneParam second(world, 1);
    // The faces are in a list: they are found there too.
    EXPECT_TRUE(torch::equal(
        torch::cat({first.face, second.face}),
        torch::cat({first.values, second.values})));
    EXPECT_EQ(first.state(), UnitState::Full);
    EXPECT_EQ(second.state(), UnitState::Full);
  });
}

TEST(FirstTouchTest, OneOperatorMayReadUnitsOfSeveralGroups) {
  on_ranks(2, [](const Group& world) {
    const Group other = *world.split(0);
    const OneParam first(world);
    const OneParam second(other);
    ASSERT_NE(&first.unit->schedule(), &second.unit->schedule());
    EXPECT_TRUE(torch::equal(
        first.face.mm(second.face), first.values.mm(second.values)));
    EXPECT_EQ(first.state(), UnitState::Full);
    EXPECT_EQ(second.state(), UnitState::Full);
  });
}

TEST(FirstTouchTest, OtherTensorsAndLeavesGatherNothing) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    const at::Tensor plain = torch::ones(3) + 1;
    EXPECT_EQ(plain.sum().item<float>(), 6);
    EXPECT_GE(param.leaf().sum().item<float>(), 0);
    EXPECT_EQ(param.state(), UnitState::Sharded);
    EXPECT_EQ(param.unit->schedule().probe_for_tests().counts.gathers, 0);
  });
}

TEST(FirstTouchTest, BackwardGathersWhatItReads) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    const at::Tensor input = torch::ones({1, 3}, torch::requires_grad());
    const at::Tensor loss = input.mm(param.face).sum();
    param.reshard();
    loss.backward();
    EXPECT_EQ(param.unit->schedule().probe_for_tests().counts.gathers, 2);
    EXPECT_TRUE(torch::equal(input.grad(), param.values.sum(1).unsqueeze(0)));
    EXPECT_EQ(param.state(), UnitState::Sharded);
  });
}

TEST(FirstTouchTest, AWriteToALeafMakesAFullUnitStale) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(param.face.clone(), param.values));
    param.leaf().add_(1);
    EXPECT_TRUE(param.unit->is_stale());
    EXPECT_TRUE(torch::equal(param.face.clone(), param.values + 1));
    EXPECT_FALSE(param.unit->is_stale());
  });
}

TEST(FirstTouchTest, AWriteToAFaceIsRefused) {
  on_ranks(2, [](const Group& world) {
    OneParam param(world);
    const at::NoGradGuard no_grad;
    EXPECT_THAT(
        error_of([&] { param.face.mul_(2); }),
        HasSubstr("unit \"unit0\": this writes to a sharded parameter"));
    const at::Tensor plain = torch::ones({3, 3});
    EXPECT_THAT(
        error_of([&] { torch::add_out(param.face, plain, plain); }),
        HasSubstr("this writes to a sharded parameter"));
    EXPECT_EQ(param.state(), UnitState::Sharded);
    EXPECT_TRUE(torch::equal(param.face.clone(), param.values));
  });
}

TEST(FirstTouchTest, ReplacingTheDataOfAFaceOrOfALeafIsRefused) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    at::Tensor face = param.face;
    EXPECT_THAT(
        error_of([&] {
          face.set_data(torch::zeros({3, 3}));
        }),
        HasSubstr("replaces the data of a sharded parameter"));
    at::Tensor leaf = param.leaf();
    EXPECT_THAT(
        error_of([&] { leaf.set_data(torch::zeros_like(leaf)); }),
        HasSubstr("would separate a shard from its unit"));
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(
        error_of([&] { leaf.set_(torch::zeros_like(leaf)); }),
        HasSubstr("would separate a shard from its unit"));
    EXPECT_THAT(
        error_of([&] {
          face.set_(torch::zeros({3, 3}));
        }),
        HasSubstr("this writes to a sharded parameter"));
    EXPECT_THAT(
        error_of([&] { leaf.detach().resize_({40}); }),
        HasSubstr("would separate a shard from its unit"));
    EXPECT_TRUE(torch::equal(param.face.detach().clone(), param.values));
  });
}

TEST(FirstTouchTest, ScalingAGradientByWhatOneRankKnowsIsRefused) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    (param.face * 2).sum().backward();
    const at::Tensor gradient = param.leaf().grad();
    const at::Tensor factor = torch::tensor(0.5);
    EXPECT_THAT(
        error_of([&] { gradient.data().mul_(factor); }),
        HasSubstr("tessera::clip_grad_norm_"));
    EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, 2)));
    gradient.mul_(factor); // a factor that all ranks know
    EXPECT_TRUE(torch::equal(gradient, torch::ones_like(gradient)));
  });
}

TEST(FirstTouchTest, SaysSoWhereTheModelIsGone) {
  on_ranks(2, [](const Group& world) {
    at::Tensor left;
    {
      const OneParam param(world);
      left = param.face.data(); // does not keep the unit
    }
    EXPECT_THAT(
        error_of([&] { left.clone(); }),
        HasSubstr("belonged to a sharded model that no longer exists"));
  });
}

TEST(FirstTouchTest, CastsOtherOperandsToTheComputeDtype) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world, 0, {.param_dtype = at::kBFloat16});
    const at::Tensor input = torch::ones({2, 3}, torch::requires_grad());
    const at::Tensor output = input.mm(param.face);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    EXPECT_EQ(input.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(param.leaf().grad().scalar_type(), at::kFloat);
  });
}

TEST(FirstTouchTest, OperatorsThatPromoteAreLeftAlone) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world, 0, {.param_dtype = at::kBFloat16});
    EXPECT_EQ((param.face + torch::ones({3, 3})).scalar_type(), at::kFloat);
  });
}

TEST(FirstTouchTest, RawAccessCountsAsAnOperator) {
  on_ranks(2, [](const Group& world) {
    const OneParam param(world);
    comm::before_raw_read(param.leaf(), "test");
    EXPECT_EQ(param.state(), UnitState::Sharded);
    comm::before_raw_read(param.face, "test");
    EXPECT_EQ(param.state(), UnitState::Full);
    EXPECT_FALSE(param.unit->is_stale());
    comm::before_raw_write(param.leaf(), "test");
    EXPECT_TRUE(param.unit->is_stale());
    EXPECT_THAT(
        error_of([&] { comm::before_raw_write(param.face, "of a test"); }),
        HasSubstr("[of a test"));
  });
}

} // namespace
} // namespace tessera::engine
