// Which rank gets which sample.
#include <tessera/data/sampler.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>

#include "data/shares.h"
#include "data/shuffle.h"
#include "data/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::first_numbers;
using ::testing::HasSubstr;
using testing::of_all_ranks;
using testing::on_ranks;
using testing::sorted;

// ---- Orders -----------------------------------------------------------------

TEST(OrderTest, VisitsEverySampleOnceForEverySize) {
  EXPECT_TRUE(rc::check([] {
    const auto size = *rc::gen::inRange<int64_t>(1, 3000);
    const auto order = shuffled_order(size, *rc::gen::arbitrary<uint64_t>());
    const auto epoch = *rc::gen::inRange<int64_t>(0, 1000000);
    std::vector<bool> seen(static_cast<size_t>(size));
    for (int64_t place = 0; place < size; ++place) {
      const int64_t index = order->at(epoch, place);
      RC_ASSERT(index >= 0 && index < size);
      RC_ASSERT(!seen[static_cast<size_t>(index)]);
      seen[static_cast<size_t>(index)] = true;
    }
  }));
}

std::vector<int64_t> epoch_of(const Order& order, int64_t epoch) {
  std::vector<int64_t> indices;
  for (int64_t place = 0; place < order.size(); ++place) {
    indices.push_back(order.at(epoch, place));
  }
  return indices;
}

TEST(OrderTest, DependsOnSeedAndEpochAlone) {
  const auto order = shuffled_order(500, 7);
  EXPECT_EQ(epoch_of(*order, 3), epoch_of(*shuffled_order(500, 7), 3));
  EXPECT_NE(epoch_of(*order, 3), epoch_of(*order, 4));
  EXPECT_NE(epoch_of(*order, 3), epoch_of(*shuffled_order(500, 8), 3));
  EXPECT_NE(epoch_of(*order, 3), first_numbers(500));
  EXPECT_EQ(epoch_of(*sequential_order(500), 3), first_numbers(500));
}

/// Runs are resumed by later versions: the order must stay what it is.
TEST(OrderTest, IsTheSameInEveryVersion) {
  EXPECT_EQ(
      epoch_of(*shuffled_order(10, 1), 0),
      (std::vector<int64_t>{0, 1, 8, 9, 3, 6, 2, 5, 7, 4}));
  EXPECT_EQ(
      epoch_of(*shuffled_order(10, 1), 1),
      (std::vector<int64_t>{5, 1, 7, 3, 0, 9, 2, 6, 8, 4}));
}

TEST(OrderTest, SpreadsEachSampleOverAllPlaces) {
  // Every sample stands in every quarter of an epoch about equally often.
  constexpr int64_t kSize = 40;
  constexpr int64_t kEpochs = 2000;
  const auto order = shuffled_order(kSize, 3);
  std::vector<std::array<int, 4>> counts(kSize);
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    for (int64_t place = 0; place < kSize; ++place) {
      const auto index = static_cast<size_t>(order->at(epoch, place));
      ++counts[index][static_cast<size_t>(place * 4 / kSize)];
    }
  }
  for (const auto& quarters : counts) {
    for (const int count : quarters) { // 500 expected, deviation about 19
      EXPECT_NEAR(count, 500, 120);
    }
  }
}

TEST(OrderTest, NeedsNoTable) {
  const auto order = shuffled_order(int64_t{1} << 60, 1);
  EXPECT_NE(order->at(0, 0), order->at(0, 1));
  EXPECT_LT(order->at(5, (int64_t{1} << 60) - 1), int64_t{1} << 60);
}

TEST(OrderTest, RejectsNoSamples) {
  EXPECT_THAT(error_of([] { shuffled_order(0, 1); }), HasSubstr("at least 1"));
}

// ---- Ranks that change ------------------------------------------------------

/// All ranks of a run, one after another in one process.
struct RunOfRanks {
  int64_t size = 1;
  EpochEnd end = EpochEnd::Pad;
  Position position = {};

  struct Step {
    std::vector<int64_t> places; // of all ranks, by rank
    std::vector<int64_t> rows; // per rank
  };

  /// The next batches of all ranks; nothing if the epoch ended on all.
  std::optional<Step> step(int num_ranks, int64_t batch_size) {
    Step step;
    std::optional<Position> next;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto stretch =
          stretch_at({size, batch_size, num_ranks, rank, end}, position);
      step.rows.push_back(stretch ? stretch->rows : 0);
      if (stretch) {
        RC_ASSERT(!next || *next == stretch->next); // equal on all ranks
        next = stretch->next;
        for (int64_t row = 0; row < stretch->rows; ++row) {
          step.places.push_back(stretch->first + row);
        }
      }
    }
    if (!next) {
      position = {position.epoch + 1, 0};
      return std::nullopt;
    }
    position = *next;
    return step;
  }
};

struct Shape {
  int num_ranks;
  int64_t batch_size;
};

Shape any_shape() {
  return {*rc::gen::inRange(1, 9), *rc::gen::inRange<int64_t>(1, 12)};
}

/// Goes through an epoch, and changes ranks and batches at random moments.
struct Epoch {
  std::vector<RunOfRanks::Step> steps;
  Shape last{}; // that found the end of the epoch
};

Epoch random_epoch(RunOfRanks& run) {
  Epoch epoch;
  epoch.last = any_shape();
  while (true) {
    if (*rc::gen::inRange(0, 3) == 0) {
      epoch.last = any_shape();
    }
    auto step = run.step(epoch.last.num_ranks, epoch.last.batch_size);
    if (!step) {
      return epoch;
    }
    epoch.steps.push_back(std::move(*step));
  }
}

std::vector<int64_t> places_of(const Epoch& epoch) {
  std::vector<int64_t> all;
  for (const auto& step : epoch.steps) {
    all.insert(all.end(), step.places.begin(), step.places.end());
  }
  return all;
}

TEST(SharesTest, UnevenTakesEverySampleOnce) {
  EXPECT_TRUE(rc::check([] {
    RunOfRanks run{*rc::gen::inRange<int64_t>(1, 300), EpochEnd::Uneven};
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      RC_ASSERT(run.position == (Position{epoch, 0}));
      const Epoch taken = random_epoch(run);
      RC_ASSERT(places_of(taken) == first_numbers(run.size)); // and in order
      for (const auto& step : taken.steps) {
        const auto [least, most] =
            std::minmax_element(step.rows.begin(), step.rows.end());
        RC_ASSERT(*most - *least <= 1);
      }
    }
  }));
}

TEST(SharesTest, DropLeavesOutLessThanOneBatchOfAllRanks) {
  EXPECT_TRUE(rc::check([] {
    RunOfRanks run{*rc::gen::inRange<int64_t>(1, 300), EpochEnd::Drop};
    for (int epoch = 0; epoch < 3; ++epoch) {
      const Epoch taken = random_epoch(run);
      const auto places = places_of(taken);
      const auto count = static_cast<int64_t>(places.size());
      RC_ASSERT(places == first_numbers(count));
      RC_ASSERT(
          run.size - count < taken.last.num_ranks * taken.last.batch_size);
      for (const auto& step : taken.steps) {
        RC_ASSERT(
            std::adjacent_find(
                step.rows.begin(), step.rows.end(), std::not_equal_to<>()) ==
            step.rows.end());
      }
    }
  }));
}

TEST(SharesTest, PadRepeatsFewerSamplesThanThereAreRanks) {
  EXPECT_TRUE(rc::check([] {
    RunOfRanks run{*rc::gen::inRange<int64_t>(1, 300), EpochEnd::Pad};
    for (int epoch = 0; epoch < 3; ++epoch) {
      const Epoch taken = random_epoch(run);
      const auto places = places_of(taken);
      const auto count = static_cast<int64_t>(places.size());
      RC_ASSERT(places == first_numbers(count)); // repeats are beyond `size`
      RC_ASSERT(count >= run.size);
      RC_ASSERT(count - run.size < std::ssize(taken.steps.back().rows));
      for (const auto& step : taken.steps) {
        RC_ASSERT(
            std::adjacent_find(
                step.rows.begin(), step.rows.end(), std::not_equal_to<>()) ==
            step.rows.end());
      }
    }
  }));
}

TEST(SharesTest, ContinueTakesEverySampleOnceInFullBatches) {
  EXPECT_TRUE(rc::check([] {
    RunOfRanks run{*rc::gen::inRange<int64_t>(1, 60), EpochEnd::Continue};
    int64_t count = 0;
    for (int i = 0; i < 40; ++i) {
      const Shape shape = any_shape();
      const int64_t before =
          run.position.epoch * run.size + run.position.samples;
      RC_ASSERT(before == count);
      const int64_t base = run.position.epoch * run.size;
      const auto step = run.step(shape.num_ranks, shape.batch_size);
      for (const int64_t place : step->places) {
        RC_ASSERT(base + place == count++);
      }
      for (const int64_t rows : step->rows) {
        RC_ASSERT(rows == shape.batch_size);
      }
    }
  }));
}

TEST(SharesTest, BatchesAreCountedAsTheyCome) {
  EXPECT_TRUE(rc::check([] {
    const auto end =
        *rc::gen::element(EpochEnd::Drop, EpochEnd::Pad, EpochEnd::Uneven);
    const Shape shape = any_shape();
    Division division{
        *rc::gen::inRange<int64_t>(1, 300),
        shape.batch_size,
        shape.num_ranks,
        *rc::gen::inRange(0, shape.num_ranks),
        end};
    const auto from = *rc::gen::inRange<int64_t>(0, division.size + 1);
    int64_t count = 0;
    Position position{0, from};
    while (const auto stretch = stretch_at(division, position)) {
      position = stretch->next;
      ++count;
    }
    RC_ASSERT(batches_from(division, from) == count);
  }));
}

// ---- On real ranks ----------------------------------------------------------

TEST(DistributedSamplerTest, RanksTakeDisjointSamplesInEveryEpoch) {
  on_ranks(3, [](const Group& world) {
    DistributedSampler sampler(
        20, SamplerOptions().batch_size(2).seed(5).epoch_end(EpochEnd::Uneven));
    std::vector<std::vector<int64_t>> epochs;
    for (int64_t epoch = 0; epoch < 2; ++epoch) {
      std::vector<int64_t> mine;
      int64_t batches = 0;
      while (const auto share = sampler.next()) {
        mine.insert(mine.end(), share->indices.begin(), share->indices.end());
        EXPECT_EQ(share->num_fresh, std::ssize(share->indices));
        ++batches;
      }
      EXPECT_EQ(sampler.position(), (Position{epoch + 1, 0}));
      EXPECT_EQ(batches, sampler.batches_per_epoch());
      epochs.push_back(of_all_ranks(world, mine));
      EXPECT_EQ(sorted(epochs.back()), first_numbers(20));
    }
    EXPECT_NE(epochs[0], epochs[1]);
  });
}

TEST(DistributedSamplerTest, PositionsAreEqualWhereSomeRanksGetNone) {
  on_ranks(3, [](const Group& world) {
    DistributedSampler sampler(
        4, SamplerOptions().shuffle(false).epoch_end(EpochEnd::Uneven));
    (void)sampler.next();
    const auto last = sampler.next(); // one sample for three ranks
    EXPECT_EQ(last.has_value(), world.rank() == 0);
    EXPECT_EQ(sampler.position(), (Position{1, 0})) << world.rank();
    if (last) {
      EXPECT_FALSE(sampler.next());
    }
    EXPECT_EQ(sampler.next()->indices.at(0), world.rank());
    EXPECT_EQ(sampler.position(), (Position{1, 3}));

    (void)sampler.next();
    sampler.seek({0, 0}); // forgets that the end of an epoch was due
    EXPECT_EQ(sampler.next()->indices.at(0), world.rank());
  });
}

TEST(DistributedSamplerTest, ShowsWhichSamplesAreRepeats) {
  on_ranks(3, [](const Group& world) {
    // 7 = 2 * 3 + 1: the last sample goes to rank 0, two repeats to the others.
    DistributedSampler sampler(
        7, SamplerOptions().batch_size(2).shuffle(false));
    EXPECT_EQ(sampler.next()->num_fresh, 2);
    const auto last = sampler.next();
    EXPECT_EQ(last->num_fresh, world.rank() == 0 ? 1 : 0);
    EXPECT_EQ(
        of_all_ranks(world, last->indices), (std::vector<int64_t>{6, 0, 1}));
    EXPECT_FALSE(sampler.next());
  });
}

TEST(DistributedSamplerTest, MoreRanksThanSamplesRepeatThemAll) {
  on_ranks(3, [](const Group& world) {
    DistributedSampler sampler(1, SamplerOptions().batch_size(4));
    EXPECT_EQ(
        of_all_ranks(world, sampler.next()->indices),
        (std::vector<int64_t>{0, 0, 0}));
    EXPECT_FALSE(sampler.next());
  });
}

TEST(DistributedSamplerTest, RejectsRanksThatDisagree) {
  on_ranks(2, [](const Group& world) {
    EXPECT_THAT(
        error_of([&] {
          DistributedSampler(
              10, SamplerOptions().seed(static_cast<uint64_t>(world.rank())));
        }),
        AllOf(HasSubstr("DistributedSampler"), HasSubstr("seed")));
    EXPECT_THAT(
        error_of([&] { DistributedSampler(10 + world.rank()); }),
        HasSubstr("size"));
    EXPECT_THAT( // one rank has no data at all
        error_of([&] { DistributedSampler(world.rank()); }),
        HasSubstr("0 samples"));
    world.barrier(); // the group stays usable
  });
}

TEST(DistributedSamplerTest, RejectsWhatCannotBe) {
  EXPECT_THAT(
      error_of([] { DistributedSampler(10, SamplerOptions().batch_size(0)); }),
      HasSubstr("batches of 0"));
  EXPECT_THAT(
      error_of([] {
        DistributedSampler(
            10, SamplerOptions().batch_size(11).epoch_end(EpochEnd::Drop));
      }),
      HasSubstr("EpochEnd::Pad"));
  DistributedSampler sampler(10);
  EXPECT_THAT(
      error_of([&] {
        sampler.seek({0, 11});
      }),
      HasSubstr("11 samples"));
  EXPECT_THAT(
      error_of([] {
        (void)DistributedSampler(
            10, SamplerOptions().epoch_end(EpochEnd::Continue))
            .batches_per_epoch();
      }),
      HasSubstr("Continue"));
}

TEST(DistributedSamplerTest, RejectsAPositionInOtherData) {
  DistributedSampler sampler(10, SamplerOptions().seed(1));
  (void)sampler.next();
  const StateDict saved = sampler.state_dict();
  DistributedSampler longer(11, SamplerOptions().seed(2));
  (void)longer.next();
  (void)longer.next();
  EXPECT_THAT(
      error_of([&] { longer.load_state_dict(saved); }),
      AllOf(HasSubstr("size: 10 against 11"), HasSubstr("seed: 1 against 2")));
  EXPECT_EQ(longer.position(), (Position{0, 2}));
  DistributedSampler same(10, SamplerOptions().seed(1).batch_size(3));
  same.load_state_dict(saved);
  EXPECT_EQ(same.position(), (Position{0, 1}));
}

} // namespace
} // namespace tessera::data
