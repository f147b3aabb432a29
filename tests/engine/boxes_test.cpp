#include "engine/boxes.h"

#include <tessera/engine/sharded_tensor.h>

#include <rapidcheck.h>

#include "engine/layout.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::engine {
namespace {

using tessera::testing::error_of;
using tessera::testing::on_ranks;
using ::testing::HasSubstr;

Shape any_shape() {
  const auto ndim = *rc::gen::inRange(0, 5);
  Shape shape;
  for (int i = 0; i < ndim; ++i) {
    shape.push_back(*rc::gen::inRange(1, 6));
  }
  return shape;
}

TEST(BoxesTest, AreTheElementsOfTheRangeInTheirOrder) {
  EXPECT_TRUE(rc::check([] {
    const Shape shape = any_shape();
    const at::Tensor whole = torch::arange(c10::multiply_integers(shape))
                                 .view(shape.empty() ? Shape{} : shape);
    const int64_t numel = whole.numel();
    const int64_t begin = *rc::gen::inRange<int64_t>(0, numel + 1);
    const int64_t count = *rc::gen::inRange<int64_t>(0, numel - begin + 1);
    std::vector<at::Tensor> parts;
    const auto boxes = boxes_of(shape, begin, count);
    for (const ShardedTensor::Box& box : boxes) {
      parts.push_back(view_of(whole, box).reshape({-1}));
      RC_ASSERT(view_of(whole, box).is_contiguous());
      RC_ASSERT(box.numel() > 0);
    }
    RC_ASSERT(
        boxes.size() <= std::max<size_t>(1, 2 * shape.size() - 1) ||
        shape.empty());
    if (count == 0) {
      RC_ASSERT(parts.empty());
      return;
    }
    RC_ASSERT(
        torch::equal(torch::cat(parts), torch::arange(begin, begin + count)));
  }));
}

TEST(BoxesTest, ARowOfAMatrixIsOneBoxAndACutThroughTwoRowsTwo) {
  EXPECT_EQ(
      boxes_of({3, 4}, 4, 4),
      (std::vector<ShardedTensor::Box>{{{1, 0}, {1, 4}}}));
  EXPECT_EQ(
      boxes_of({3, 4}, 2, 4),
      (std::vector<ShardedTensor::Box>{{{0, 2}, {1, 2}}, {{1, 0}, {1, 2}}}));
  EXPECT_EQ(
      boxes_of({3, 4}, 1, 10),
      (std::vector<ShardedTensor::Box>{
          {{0, 1}, {1, 3}}, {{1, 0}, {1, 4}}, {{2, 0}, {1, 3}}}));
  EXPECT_EQ(boxes_of({}, 0, 1), (std::vector<ShardedTensor::Box>{{{}, {}}}));
}

/// This rank's part of `whole` under a layout.
ShardedTensor cut_of(
    const at::Tensor& whole,
    Layout::Kind kind,
    const Group& group) {
  const Shape shape = whole.sizes().vec();
  const Layout layout(kind, {shape}, group.size(), {.param = 1, .shard = 1});
  const Run run = layout.run(0, group.rank());
  std::vector<ShardedTensor::Piece> pieces;
  for (ShardedTensor::Box& box : boxes_of(shape, run.param_begin, run.numel)) {
    const at::Tensor part = view_of(whole, box).clone();
    pieces.push_back({std::move(box), part});
  }
  return {shape, whole.scalar_type(), std::move(pieces), group};
}

TEST(ShardedTensorTest, FullTensorIsWhatWasCut) {
  on_ranks(3, [](const Group& world) {
    for (const Shape& shape :
         {Shape{},
          Shape{1},
          Shape{7},
          Shape{5, 3},
          Shape{2, 3, 4},
          Shape{0, 4}}) {
      for (const auto kind : {Layout::Kind::Flat, Layout::Kind::Dim0}) {
        for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
          const at::Tensor whole = torch::arange(c10::multiply_integers(shape))
                                       .view(shape)
                                       .to(dtype);
          const auto sharded = cut_of(whole, kind, world);
          EXPECT_TRUE(torch::equal(sharded.full_tensor(), whole)) << shape;
          EXPECT_EQ(sharded.numel(), whole.numel());
        }
      }
    }
  });
}

TEST(ShardedTensorTest, RejectsPiecesThatAreNotTheTensor) {
  on_ranks(2, [](const Group& world) {
    EXPECT_THAT(
        error_of([&] {
          ShardedTensor(
              {4}, at::kFloat, {{{{3}, {2}}, torch::zeros({2})}}, world);
        }),
        HasSubstr("box at [3] of sizes [2] is not inside"));
    EXPECT_THAT(
        error_of([&] {
          ShardedTensor(
              {4}, at::kFloat, {{{{0}, {2}}, torch::zeros({3})}}, world);
        }),
        HasSubstr("a piece has Float [3]"));
    const ShardedTensor twice(
        {4}, at::kFloat, {{{{0}, {2}}, torch::zeros({2})}}, world);
    EXPECT_THAT(error_of([&] { twice.full_tensor(); }), HasSubstr("overlap"));
    const ShardedTensor half(
        {4}, at::kFloat, {{{{world.rank()}, {1}}, torch::zeros({1})}}, world);
    EXPECT_THAT(
        error_of([&] { half.full_tensor(); }),
        HasSubstr("have 2 of its 4 elements"));
  });
}

} // namespace
} // namespace tessera::engine
