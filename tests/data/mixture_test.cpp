// Several sources in proportion to their weights.
#include <tessera/data/loader.h>
#include <tessera/data/mixture.h>
#include <tessera/data/token_windows.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <map>

#include "data/even_choice.h"
#include "data/support.h"
#include "support/errors.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::Numbers;
using testing::TempFolder;

TEST(EvenChoiceTest, CountsWhatWasChosenBefore) {
  EXPECT_TRUE(rc::check([] {
    const auto count = *rc::gen::inRange<size_t>(1, 6);
    const auto raw =
        *rc::gen::container<std::vector<int>>(count, rc::gen::inRange(1, 1000));
    const std::vector<double> weights(raw.begin(), raw.end());
    const EvenChoice choice(weights, *rc::gen::arbitrary<uint64_t>());
    RC_ASSERT(choice.is_valid());
    std::vector<int64_t> seen(count, 0);
    for (int64_t number = 0; number < 400; ++number) {
      const auto chosen = choice.at(number);
      RC_ASSERT(chosen.which < count);
      RC_ASSERT(chosen.earlier == seen[chosen.which]++);
    }
  }));
}

TEST(EvenChoiceTest, KeepsProportionsInEveryStretch) {
  EXPECT_TRUE(rc::check([] {
    const std::vector<double> weights{0.5, 0.3, 0.15, 0.05};
    const EvenChoice choice(weights, *rc::gen::arbitrary<uint64_t>());
    const auto begin = *rc::gen::inRange<int64_t>(0, int64_t{1} << 50);
    constexpr int kLength = 1000;
    std::vector<int> counts(4, 0);
    for (int i = 0; i < kLength; ++i) {
      ++counts[choice.at(begin + i).which];
    }
    for (size_t i = 0; i < 4; ++i) {
      RC_ASSERT(std::abs(counts[i] - weights[i] * kLength) < 10);
    }
  }));
}

TEST(EvenChoiceTest, CountsFarBeyondAnyRun) {
  // One step further, one more of what was chosen.
  const EvenChoice choice({2, 1}, 123);
  const int64_t far = (int64_t{1} << 61) + 12345;
  std::map<size_t, int64_t> next;
  for (int64_t number = far; number < far + 100; ++number) {
    const auto chosen = choice.at(number);
    if (next.contains(chosen.which)) {
      EXPECT_EQ(chosen.earlier, next[chosen.which]);
    }
    next[chosen.which] = chosen.earlier + 1;
  }
  EXPECT_NEAR(
      static_cast<double>(next[0]) / static_cast<double>(next[1]), 2, 1e-6);
}

Mixture<at::Tensor> make_mixture() {
  Mixture<at::Tensor> mixture;
  mixture.add("small", Numbers{.count = 10}, 3)
      .add("large", Numbers{.count = 1000}, 1);
  return mixture;
}

TEST(MixtureTest, EachSourceGoesThroughItsSamplesBeforeItRepeatsOne) {
  const auto order = make_mixture().order(4, true);
  EXPECT_EQ(order->size(), 1010);
  std::vector<int64_t> small;
  std::vector<int64_t> large;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    for (int64_t place = 0; place < order->size(); ++place) {
      const int64_t index = order->at(epoch, place);
      (index < 10 ? small : large).push_back(index < 10 ? index : index - 10);
    }
  }
  EXPECT_NEAR(static_cast<double>(small.size()), 3030, 5);
  EXPECT_NEAR(static_cast<double>(large.size()), 1010, 5);
  for (size_t i = 0; i + 10 <= small.size(); i += 10) {
    const auto begin = small.begin() + static_cast<std::ptrdiff_t>(i);
    EXPECT_EQ(testing::sorted({begin, begin + 10}), testing::first_numbers(10));
  }
  EXPECT_EQ(
      testing::sorted({large.begin(), large.begin() + 1000}),
      testing::first_numbers(1000));
  // The second time in another order.
  EXPECT_NE(
      std::vector<int64_t>(small.begin(), small.begin() + 10),
      std::vector<int64_t>(small.begin() + 10, small.begin() + 20));
}

TEST(MixtureTest, WithoutShufflingSourcesComeAsTheyAre) {
  const auto order = make_mixture().order(4, false);
  int64_t next = 0;
  for (int64_t place = 0; place < 100; ++place) {
    const int64_t index = order->at(0, place);
    if (index < 10) {
      EXPECT_EQ(index, next++ % 10);
    }
  }
  EXPECT_NEAR(static_cast<double>(next), 75, 3);
}

TEST(MixtureTest, ALoaderResumesInTheMiddle) {
  const auto options =
      LoaderOptions().batch_size(3).seed(9).epoch_end(EpochEnd::Continue);
  Loader whole(make_mixture(), options);
  for (int i = 0; i < 400; ++i) { // beyond the first epoch
    (void)whole.next();
  }
  const StateDict saved = whole.state_dict();
  std::vector<std::vector<int64_t>> expected;
  for (int i = 0; i < 20; ++i) {
    expected.push_back(testing::values_of(*whole.next()));
  }
  Loader resumed(make_mixture(), LoaderOptions(options).batch_size(6));
  resumed.load_state_dict(saved);
  for (size_t i = 0; i < 20; i += 2) {
    EXPECT_EQ(
        testing::values_of(*resumed.next()),
        testing::joined({expected[i], expected[i + 1]}));
  }
}

// The order of the sources decides which samples come when.
TEST(MixtureTest, RejectsThePositionOfOtherPlaces) {
  const auto mixture_of = [](const char* first, const char* second) {
    Mixture<at::Tensor> mixture;
    mixture.add(first, Numbers{.count = 5}, 1)
        .add(second, Numbers{.count = 5}, 1);
    return Loader(std::move(mixture), LoaderOptions());
  };
  auto saved = mixture_of("books", "code");
  auto same = mixture_of("books", "code");
  same.load_state_dict(saved.state_dict());
  auto swapped = mixture_of("code", "books");
  EXPECT_THAT(
      error_of([&] { swapped.load_state_dict(saved.state_dict()); }),
      HasSubstr("place"));
}

TEST(MixtureTest, TokenFilesAreMixed) {
  const TempFolder folder;
  Mixture<TokenBatch> mixture;
  mixture
      .add(
          "a", TokenWindows(testing::counting_file(folder / "a", 101), 10), 0.5)
      .add(
          "b",
          TokenWindows(testing::counting_file(folder / "b", 1001), 10),
          0.5)
      .epoch_size(40);
  Loader loader(std::move(mixture), LoaderOptions().batch_size(8));
  EXPECT_EQ(loader.batches_per_epoch(), 5);
  int64_t from_a = 0;
  while (const auto batch = loader.next()) {
    EXPECT_EQ(batch->inputs.sizes(), (at::IntArrayRef{8, 10}));
    EXPECT_TRUE(torch::equal(batch->inputs + 1, batch->targets));
    from_a += (batch->inputs.select(1, 0) < 100).sum().item<int64_t>();
  }
  EXPECT_GE(from_a, 18); // 20, and windows of b that begin below 100
  EXPECT_LE(from_a, 24);
}

TEST(MixtureTest, ErrorsNameTheSource) {
  Mixture<at::Tensor> mixture;
  mixture.add("good", Numbers{.count = 5}, 1)
      .add("bad", Numbers{.count = 4, .bad = {2}}, 1);
  Loader loader(std::move(mixture), LoaderOptions().shuffle(false));
  EXPECT_THAT(
      error_of([&] {
        while (loader.next()) {
        }
      }),
      AllOf(
          HasSubstr("sample 2 of source \"bad\""),
          HasSubstr("the disk ate it")));
}

TEST(MixtureTest, RejectsWhatIsNoMixture) {
  const auto error_for = [](const std::vector<MixedSource>& sources) {
    return error_of([&] { mixture_order(sources, 1); });
  };
  EXPECT_THAT(error_for({}), HasSubstr("without sources"));
  EXPECT_THAT(error_for({{"a", 0, 1}}), HasSubstr("\"a\" has 0 samples"));
  EXPECT_THAT(error_for({{"a", 1, -1}}), HasSubstr("weight -1"));
  EXPECT_THAT(error_for({{"a", 1, NAN}}), HasSubstr("weight nan"));
  EXPECT_THAT(
      error_for({{"a", 1, 1}, {"a", 1, 1}}), HasSubstr("name of its own"));
  EXPECT_THAT(
      error_for({{"a", 1, 1}, {"b", 1, 1e-12}}), HasSubstr("billionth"));
}

} // namespace
} // namespace tessera::data
