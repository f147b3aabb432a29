// The pieces that plans are made of.
#include <tessera/ddp/distributed_data_parallel.h>

#include "ddp/bucket_packing.h"
#include "plan/checked.h"
#include "plan/ledger.h"
#include "plan/pool.h"
#include "plan/traffic.h"
#include "plan/unit_sizes.h"

namespace tessera::plan {
namespace {

using format::DType;
using ::testing::ElementsAre;

TEST(LedgerTest, PeakIsTheMomentOfTheHighestTotal) {
  Ledger ledger;
  ledger.add(Kind::Shards, 10);
  ledger.add(Kind::Activations, 100);
  ledger.drop(Kind::Activations, 60);
  ledger.add(Kind::Gradients, 55); // 105 in all
  EXPECT_EQ(ledger.peak().total(), 110);
  EXPECT_EQ(ledger.peak().of(Kind::Gradients), 0);
  EXPECT_EQ(ledger.highest().of(Kind::Gradients), 55);
  ledger.touch(Kind::Full, 6);
  EXPECT_EQ(ledger.peak().total(), 111);
  EXPECT_EQ(ledger.peak().of(Kind::Activations), 40);
  ledger.reset_peak();
  EXPECT_EQ(ledger.peak().total(), 105);
  EXPECT_EQ(ledger.highest().of(Kind::Activations), 40);
}

TEST(LedgerTest, RejectsMoreThanCanBeCounted) {
  Ledger ledger;
  ledger.add(Kind::Shards, INT64_MAX - 1);
  EXPECT_THROW(ledger.add(Kind::Full, 2), TooLarge);
}

TEST(PoolTest, KeepsThreeOfASizeAndTwoBetweenSteps) {
  Ledger ledger;
  Pool pool(ledger, /*keeps=*/true);
  for (int i = 0; i < 4; ++i) {
    pool.take(8, Kind::Full);
  }
  for (int i = 0; i < 4; ++i) {
    pool.give(8, Kind::Full);
  }
  EXPECT_EQ(ledger.now().of(Kind::Full), 0);
  EXPECT_EQ(ledger.now().of(Kind::Buffers), 24);
  pool.trim();
  EXPECT_EQ(ledger.now().of(Kind::Buffers), 16);
  pool.take(8, Kind::Gradients); // one of those
  EXPECT_EQ(ledger.now().of(Kind::Buffers), 8);
  EXPECT_EQ(ledger.now().total(), 16);
  EXPECT_EQ(ledger.peak().total(), 32);
}

TEST(PoolTest, KeepsNothingWhereAllocatorsDo) {
  Ledger ledger;
  Pool pool(ledger, /*keeps=*/false);
  pool.take(8, Kind::Full);
  pool.give(8, Kind::Full);
  EXPECT_EQ(ledger.now().total(), 0);
}

TEST(WireTest, RanksSendAllButTheirOwnPart) {
  Wire wire;
  wire.count(Operation::GatherForward, 400, 4);
  wire.count_sum(Operation::AllReduce, 400, 4);
  wire.count(Operation::ReduceScatter, 400, 1); // nobody to send to
  EXPECT_EQ(wire.of(Operation::GatherForward).sent_bytes, 300);
  EXPECT_EQ(wire.of(Operation::AllReduce).sent_bytes, 600);
  EXPECT_EQ(wire.of(Operation::ReduceScatter).collectives, 0);
  EXPECT_EQ(wire.total().tensor_bytes, 800);
  EXPECT_EQ(wire.total().collectives, 2);
}

TEST(ReplicatedRankTest, BucketsHaveTheDefaultSizesOfDdp) {
  const auto options = DDPOptions();
  const ddp::BucketLimits limits;
  constexpr double kMb = 1 << 20;
  EXPECT_EQ(options.first_bucket_mb() * kMb, limits.first_bucket_bytes);
  EXPECT_EQ(options.bucket_cap_mb() * kMb, limits.bucket_bytes);
}

UnitKind kind_of(std::vector<engine::Shape> shapes) {
  UnitKind kind;
  for (engine::Shape& shape : shapes) {
    kind.params.push_back({.name = "p", .shape = std::move(shape)});
  }
  return kind;
}

TEST(UnitSizesTest, CountsPaddingAndDtypes) {
  // 7 * 15 elements, then 3 at an offset of 112: 115 over 2 ranks are 58, 64
  // with padding.
  const TrainingSetup setup{
      .shards = 2, .param_dtype = DType::BFloat16, .device = Device::Cuda};
  const UnitSizes sizes = sizes_of(kind_of({{7, 15}, {3}}), setup);
  ASSERT_EQ(sizes.bundles.size(), 1);
  EXPECT_EQ(sizes.shard(), 64 * 4);
  EXPECT_EQ(sizes.full(), 128 * 2);
  EXPECT_EQ(sizes.bundles[0].gradients, 128 * 4);
  EXPECT_EQ(sizes.bundles[0].reduced, 64 * 4);
  EXPECT_EQ(sizes.own(), 64 * 4); // all of it is of the first parameter
  EXPECT_FALSE(sizes.bundles[0].converts_gradient);
  EXPECT_THAT(sizes.full_gradients, ElementsAre(105 * 2, 3 * 2));
}

TEST(UnitSizesTest, OneRankShowsItsShardUnlessItComputesInAnotherDtype) {
  TrainingSetup setup;
  EXPECT_EQ(sizes_of(kind_of({{8, 8}}), setup).full(), 0);
  setup.param_dtype = DType::Float16;
  EXPECT_EQ(sizes_of(kind_of({{8, 8}}), setup).full(), 128);
}

TEST(UnitSizesTest, DtypesHaveBuffersOfTheirOwn) {
  UnitKind kind = kind_of({{16}, {16}, {16}});
  kind.params[1].dtype = DType::BFloat16;
  kind.params[2].dtype = DType::Complex64; // is not cast
  const TrainingSetup setup{
      .shards = 1, .param_dtype = DType::BFloat16, .offload = true};
  const UnitSizes sizes = sizes_of(kind, setup);
  EXPECT_EQ(sizes.bundles.size(), 3);
  EXPECT_EQ(sizes.shard(), 64 + 32 + 128);
  EXPECT_EQ(sizes.full(), 32 + 32 + 128);
}

TEST(UnitSizesTest, MoreRanksThanRowsMoveWholeParameters) {
  TrainingSetup setup{.shards = 4, .layout = engine::Layout::Kind::Dim0};
  const auto sizes = [&] {
    return sizes_of(kind_of({{8, 16}, {8, 16}}), setup).bundles.at(0);
  };
  EXPECT_TRUE(sizes().copies_out);
  EXPECT_FALSE(sizes().travels_whole);
  EXPECT_EQ(sizes().gathered, 256 * 4);
  setup.shards = 16384;
  EXPECT_FALSE(sizes().copies_out);
  EXPECT_TRUE(sizes().travels_whole);
  EXPECT_EQ(sizes().shard, 32 * 4); // of rank 0: a row of each
  EXPECT_EQ(sizes().gathered, 256 * 4);
  EXPECT_EQ(sizes().full, 256 * 4);
  EXPECT_EQ(sizes().gradients, 256 * 4);
  EXPECT_EQ(sizes().reduced, 32 * 4);
}

TEST(UnitSizesTest, RejectsWhatOverflows) {
  const int64_t huge = int64_t{1} << 40;
  for (const auto& shape : std::vector<engine::Shape>{
           {huge, huge}, {huge, 1 << 20}, {1, int64_t{1} << 58}}) {
    for (const auto layout :
         {engine::Layout::Kind::Flat, engine::Layout::Kind::Dim0}) {
      const TrainingSetup setup{.shards = kMostRanks, .layout = layout};
      EXPECT_THROW(sizes_of(kind_of({shape}), setup), TooLarge);
    }
  }
}

} // namespace
} // namespace tessera::plan
