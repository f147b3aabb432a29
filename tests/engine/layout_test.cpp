#include "engine/layout.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <numeric>

namespace tessera::engine {
namespace {

struct Case {
  std::vector<Shape> shapes;
  int num_ranks;
};

Case any_case() {
  const auto num_params = *rc::gen::inRange(1, 6);
  Case result;
  for (int i = 0; i < num_params; ++i) {
    Shape shape;
    for (int dims = *rc::gen::inRange(0, 4); dims > 0; --dims) {
      shape.push_back(*rc::gen::inRange<int64_t>(0, 20));
    }
    result.shapes.push_back(shape);
  }
  result.num_ranks = *rc::gen::element(1, 2, 3, 4, 5, 6, 7, 8, 100);
  return result;
}

/// Properties hold for any shapes and any number of ranks.
void check_property(const std::function<void(const Layout&)>& property) {
  const bool held = rc::check([&] {
    const Case any = any_case();
    for (auto kind : {Layout::Kind::Flat, Layout::Kind::Dim0}) {
      property(Layout(kind, any.shapes, any.num_ranks));
    }
  });
  EXPECT_TRUE(held);
}

TEST(LayoutTest, EveryElementIsOnExactlyOneRank) {
  check_property([](const Layout& layout) {
    for (size_t param = 0; param < layout.num_params(); ++param) {
      int64_t next = 0;
      for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        const auto run = layout.run(param, rank);
        if (run.numel > 0) {
          RC_ASSERT(run.param_begin == next);
          next += run.numel;
        }
      }
      RC_ASSERT(next == layout.numel(param));
    }
  });
}

TEST(LayoutTest, RunsOfAShardDoNotOverlapAndFit) {
  check_property([](const Layout& layout) {
    for (int rank = 0; rank < layout.num_ranks(); ++rank) {
      int64_t end = 0;
      for (size_t param = 0; param < layout.num_params(); ++param) {
        const auto run = layout.run(param, rank);
        if (run.numel > 0) {
          RC_ASSERT(run.shard_begin >= end);
          end = run.shard_begin + run.numel;
        }
      }
      RC_ASSERT(end <= layout.shard_numel());
    }
  });
}

TEST(LayoutTest, ParametersDoNotOverlapInTheFullBuffer) {
  check_property([](const Layout& layout) {
    int64_t end = 0;
    for (size_t param = 0; param < layout.num_params(); ++param) {
      RC_ASSERT(layout.full_offset(param) >= end);
      RC_ASSERT(layout.full_offset(param) % 16 == 0);
      end = layout.full_offset(param) + layout.numel(param);
    }
    RC_ASSERT(end <= layout.full_numel());
  });
}

TEST(LayoutTest, FlatShardsOneAfterAnotherAreTheFullBuffer) {
  check_property([](const Layout& layout) {
    if (layout.kind() != Layout::Kind::Flat) {
      return;
    }
    RC_ASSERT(layout.full_numel() == layout.shard_numel() * layout.num_ranks());
    for (size_t param = 0; param < layout.num_params(); ++param) {
      for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        const auto run = layout.run(param, rank);
        if (run.numel > 0) {
          RC_ASSERT(
              layout.full_offset(param) + run.param_begin ==
              rank * layout.shard_numel() + run.shard_begin);
        }
      }
    }
  });
}

TEST(LayoutTest, FlatFollowsTheAlignmentItIsGiven) {
  // FSDP1 with original parameters: 16 bytes of float32, shards not rounded.
  const Layout inner(Layout::Kind::Flat, {{5, 5}}, 2, {.param = 4, .shard = 1});
  EXPECT_EQ(inner.shard_numel(), 13);
  EXPECT_EQ(inner.full_numel(), 26);
  const Layout two(Layout::Kind::Flat, {{3}, {5}}, 2, {.param = 4, .shard = 1});
  EXPECT_EQ(two.full_offset(1), 4);
  EXPECT_EQ(two.shard_numel(), 5);
}

TEST(LayoutTest, Dim0GivesWholeRowsInChunksOfTheSameSize) {
  const Layout layout(Layout::Kind::Dim0, {{5, 3}, {2}, {}}, 4);
  EXPECT_EQ(layout.local_shape(0, 0), (Shape{2, 3}));
  EXPECT_EQ(layout.local_shape(0, 2), (Shape{1, 3}));
  EXPECT_EQ(layout.local_shape(0, 3), (Shape{0, 3}));
  EXPECT_EQ(layout.local_shape(1, 1), (Shape{1}));
  EXPECT_EQ(layout.local_shape(1, 2), (Shape{0}));
  EXPECT_EQ(layout.local_shape(2, 0), (Shape{}));
  EXPECT_EQ(layout.local_shape(2, 1), (Shape{0}));
}

TEST(LayoutTest, Dim0PadsTheFullBufferOnlyToAlignParameters) {
  check_property([](const Layout& layout) {
    if (layout.kind() == Layout::Kind::Dim0) {
      RC_ASSERT(layout.full_numel() < layout.unpadded_numel() + 16);
    }
  });
}

TEST(LayoutTest, Dim0MovesAtMostTwiceWhatThereIs) {
  check_property([](const Layout& layout) {
    if (layout.kind() == Layout::Kind::Dim0) {
      RC_ASSERT(layout.travel_numel() <= 2 * layout.full_numel());
    }
  });
  // A block of a transformer of width 256.
  const std::vector<Shape> block{
      {768, 256}, {768}, {256, 256}, {256}, {1024, 256}, {1024}, {256, 1024}};
  for (const int ranks : {8, 128, 256, 512, 1024, 16384, 1 << 20}) {
    const Layout layout(Layout::Kind::Dim0, block, ranks);
    EXPECT_EQ(layout.full_numel(), 788480) << ranks;
    EXPECT_LE(layout.travel_numel(), 2 * layout.full_numel()) << ranks;
  }
}

TEST(LayoutTest, Dim0MovesShardsWhileMostOfThemIsNotPadding) {
  using Travel = Layout::Travel;
  const auto travel = [](const Shape& shape, int ranks) {
    return Layout(Layout::Kind::Dim0, {shape}, ranks).travel();
  };
  EXPECT_EQ(travel({64, 64}, 1), Travel::Chunks);
  EXPECT_EQ(travel({64, 64}, 64), Travel::Chunks);
  EXPECT_EQ(travel({64, 64}, 128), Travel::Chunks); // a sum sends as much
  EXPECT_EQ(travel({64, 64}, 129), Travel::Whole);
  EXPECT_EQ(travel({3, 64}, 4), Travel::Chunks);
  EXPECT_EQ(travel({1, 64}, 2), Travel::Chunks);
  EXPECT_EQ(travel({1, 64}, 3), Travel::Whole);
}

TEST(LayoutTest, LocalShapesHoldTheRunsElements) {
  check_property([](const Layout& layout) {
    for (size_t param = 0; param < layout.num_params(); ++param) {
      for (int rank = 0; rank < layout.num_ranks(); ++rank) {
        const Shape shape = layout.local_shape(param, rank);
        const int64_t numel = std::accumulate(
            shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
        RC_ASSERT(numel == layout.run(param, rank).numel);
      }
    }
  });
}

} // namespace
} // namespace tessera::engine
