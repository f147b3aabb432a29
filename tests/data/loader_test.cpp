// Loaders in one process: order, workers, shutdown, batches of any type.
#include <tessera/data/loader.h>
#include <tessera/data/token_windows.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <atomic>
#include <memory>

#include "data/support.h"
#include "support/device.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::first_numbers;
using ::testing::HasSubstr;
using testing::joined;
using testing::Numbers;
using testing::of_all_ranks;
using testing::on_ranks;
using testing::rest_of;
using testing::sorted;
using ::testing::StartsWith;
using testing::test_device;
using testing::values_of;

TEST(LoaderTest, BatchesComeInOrderForEveryNumberOfWorkers) {
  const auto options = LoaderOptions().batch_size(3).seed(4);
  Loader alone(Numbers{.count = 50}, LoaderOptions(options).num_workers(0));
  const auto first = rest_of(alone);
  const auto second = rest_of(alone);
  EXPECT_EQ(std::ssize(first), alone.batches_per_epoch());
  EXPECT_EQ(sorted(joined(first)), first_numbers(50));
  EXPECT_EQ(sorted(joined(second)), first_numbers(50));
  EXPECT_NE(first, second);
  for (const int workers : {1, 2, 5}) {
    for (const int prefetch : {1, 2, 7}) {
      Loader loader(
          Numbers{.count = 50, .is_uneven = true},
          LoaderOptions(options).num_workers(workers).prefetch(prefetch));
      EXPECT_EQ(rest_of(loader), first);
      EXPECT_EQ(rest_of(loader), second);
    }
  }
}

TEST(LoaderTest, RanksSeeTogetherWhatOneProcessSees) {
  on_ranks(3, [](const Group& world) {
    const auto options = LoaderOptions().seed(4).epoch_end(EpochEnd::Continue);
    Loader ours(Numbers{.count = 20}, LoaderOptions(options).batch_size(2));
    Loader alone(
        Numbers{.count = 20},
        LoaderOptions(options).batch_size(6).group(world.alone()));
    for (int i = 0; i < 10; ++i) { // three epochs
      EXPECT_EQ(
          of_all_ranks(world, values_of(*ours.next())),
          values_of(*alone.next()));
      EXPECT_EQ(ours.position(), alone.position());
    }
  });
}

TEST(LoaderTest, EpochsAreLoopsOverTheLoader) {
  Loader loader(Numbers{.count = 5}, LoaderOptions().batch_size(2).seed(1));
  std::vector<int64_t> seen;
  for (const at::Tensor& batch : loader) {
    const auto values = values_of(batch);
    seen.insert(seen.end(), values.begin(), values.end());
  }
  EXPECT_EQ(sorted(seen), first_numbers(5));
  EXPECT_EQ(loader.position(), (Position{1, 0}));
  (void)loader.next();
  EXPECT_EQ(loader.position(), (Position{1, 2}));
  EXPECT_EQ(loader.batches_left(), 2);
}

TEST(LoaderTest, AnEpochCanBeChosen) {
  Loader loader(Numbers{.count = 30}, LoaderOptions().batch_size(4).seed(1));
  (void)rest_of(loader);
  const auto second = rest_of(loader);
  loader.set_epoch(1);
  EXPECT_EQ(rest_of(loader), second);
  loader.set_epoch(1);
  (void)loader.next();
  loader.set_epoch(1); // with batches read ahead, which are dropped
  EXPECT_EQ(rest_of(loader), second);
}

/// How many samples were read, and how many threads are reading.
struct Watched {
  struct Counts {
    std::atomic<int64_t> reads{0};
    std::atomic<int> alive{0};
  };
  std::shared_ptr<Counts> counts = std::make_shared<Counts>();

  int64_t size() const {
    return 1000;
  }
  at::Tensor get(size_t index) const {
    ++counts->alive;
    ++counts->reads;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    --counts->alive;
    return torch::tensor({static_cast<int64_t>(index)});
  }
};

TEST(LoaderTest, ReadsNoFurtherAheadThanAsked) {
  const Watched dataset;
  Loader loader(
      dataset, LoaderOptions().batch_size(2).num_workers(3).prefetch(4));
  EXPECT_EQ(dataset.counts->reads, 0); // nothing before it is asked for
  for (int i = 0; i < 20; ++i) {
    (void)loader.next();
    EXPECT_LE(dataset.counts->reads, 2 * (i + 1 + 4));
  }
}

TEST(LoaderTest, EndsItsWorkersAtAnyMoment) {
  for (int round = 0; round < 50; ++round) {
    const Watched dataset;
    {
      Loader loader(
          dataset, LoaderOptions().num_workers(round % 4).prefetch(3));
      for (int i = 0; i < round % 5; ++i) {
        (void)loader.next();
      }
    }
    EXPECT_EQ(dataset.counts->alive, 0);
    EXPECT_EQ(dataset.counts.use_count(), 1); // nobody has the data set
  }
}

// ---- Batches of any type ----------------------------------------------------

TEST(LoaderTest, TakesDataSetsOfLibTorch) {
  const auto data = torch::arange(20).view({10, 2});
  const auto targets = torch::arange(10);
  Loader loader(
      torch::data::datasets::TensorDataset(data),
      LoaderOptions().batch_size(4).shuffle(false));
  EXPECT_TRUE(torch::equal(loader.next()->data, data.narrow(0, 0, 4)));

  struct Pairs : torch::data::datasets::Dataset<Pairs> {
    torch::data::Example<> get(size_t index) override {
      return {
          torch::full({2}, static_cast<int64_t>(index)),
          torch::tensor(static_cast<int64_t>(index))};
    }
    std::optional<size_t> size() const override {
      return 10;
    }
  };
  Loader pairs(Pairs(), LoaderOptions().batch_size(4).shuffle(false));
  const auto batch = pairs.next();
  EXPECT_EQ(batch->data.sizes(), (at::IntArrayRef{4, 2}));
  EXPECT_TRUE(torch::equal(batch->target, targets.narrow(0, 0, 4)));
}

TEST(LoaderTest, CollatesAsTheUserSays) {
  // Texts of different lengths, padded.
  struct Texts {
    size_t size() const {
      return 4;
    }
    std::string get(size_t index) const {
      return std::string(index + 1, 'x');
    }
  };
  Loader loader(
      Texts(),
      LoaderOptions().batch_size(2).shuffle(false),
      [](const std::vector<std::string>& texts) {
        std::string all;
        for (const auto& text : texts) {
          all += text + "|";
        }
        return all;
      });
  EXPECT_EQ(*loader.next(), "x|xx|");
  EXPECT_EQ(*loader.next(), "xxx|xxxx|");
  EXPECT_FALSE(loader.next());
}

struct Labelled {
  at::Tensor image;
  std::vector<at::Tensor> boxes;
};
template <class Visitor>
void for_each_tensor(Labelled& sample, const Visitor& visitor) {
  visitor(sample.image);
  visitor(sample.boxes.at(0));
}

TEST(LoaderTest, StacksAndMovesTypesOfTheUser) {
  struct Images {
    size_t size() const {
      return 6;
    }
    Labelled get(size_t index) const {
      const auto value = static_cast<double>(index);
      return {torch::full({2, 2}, value), {torch::full({4}, -value)}};
    }
  };
  Loader loader(
      Images(),
      LoaderOptions().batch_size(3).shuffle(false).device(test_device()));
  (void)loader.next();
  const auto batch = loader.next();
  EXPECT_EQ(batch->image.device(), test_device());
  EXPECT_EQ(batch->image.sizes(), (at::IntArrayRef{3, 2, 2}));
  EXPECT_EQ(batch->boxes[0].device(), test_device());
  EXPECT_EQ(batch->image.sum().item<double>(), 4 * (3 + 4 + 5));
  EXPECT_EQ(batch->boxes[0].sum().item<double>(), -4 * (3 + 4 + 5));
}

/// On a GPU: copies that the caller's stream has to wait for.
TEST(LoaderTest, BatchesOnTheDeviceHaveTheirValues) {
  struct Large {
    size_t size() const {
      return 64;
    }
    at::Tensor get(size_t index) const {
      return torch::full({1 << 18}, static_cast<int64_t>(index));
    }
  };
  for (const int workers : {0, 3}) {
    Loader loader(
        Large(),
        LoaderOptions()
            .batch_size(4)
            .seed(2)
            .device(test_device())
            .num_workers(workers)
            .prefetch(5));
    auto sum = torch::zeros(
        {}, torch::TensorOptions(torch::kLong).device(test_device()));
    while (auto batch = loader.next()) {
      EXPECT_EQ(batch->device(), test_device());
      sum += batch->sum();
    }
    EXPECT_EQ(sum.item<int64_t>(), (int64_t{1} << 18) * (63 * 64 / 2));
  }
}

TEST(LoaderTest, RejectsOptionsThatCannotBe) {
  const auto error_for = [](const LoaderOptions& options) {
    return error_of([&] { Loader(Numbers{.count = 5}, options); });
  };
  EXPECT_THAT(
      error_for(LoaderOptions().num_workers(-1)), HasSubstr("-1 workers"));
  EXPECT_THAT(error_for(LoaderOptions().prefetch(0)), HasSubstr("0 batches"));
  EXPECT_THAT(
      error_for(LoaderOptions().batch_size(0)),
      AllOf(StartsWith("[Loader]"), HasSubstr("of 0")));
  EXPECT_THAT(
      error_for(LoaderOptions().device(at::Device("cuda:99"))),
      HasSubstr("cuda:99"));
  EXPECT_THAT(
      error_of([] { Loader(Numbers{.count = 0}); }), HasSubstr("0 samples"));
  EXPECT_THAT(
      error_of([] {
        Loader(
            Numbers{.count = 5},
            LoaderOptions().device(at::Device("cuda")),
            [](const std::vector<at::Tensor>&) { return 1; });
      }),
      HasSubstr("for_each_tensor"));
}

TEST(LoaderTest, AnOptionThatOneRankCannotHonourIsAnErrorOnAll) {
  on_ranks(2, [](const Group& world) {
    EXPECT_THAT(
        error_of([&] {
          Loader(
              Numbers{.count = 5},
              LoaderOptions().num_workers(world.rank() == 0 ? 1 : -1));
        }),
        HasSubstr("-1 workers"));
    world.barrier();
  });
}

} // namespace
} // namespace tessera::data
