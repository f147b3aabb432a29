// A sample that cannot be read on one rank is an error on all.
#include <tessera/data/loader.h>
#include <tessera/data/token_windows.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "data/support.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::Numbers;
using testing::on_ranks;
using testing::RanksOptions;
using testing::TempFolder;
using testing::values_of;

TEST(WorkerErrorTest, NamesSampleAndSourceAndStays) {
  for (const int workers : {0, 1, 3}) {
    Loader loader(
        Numbers{.count = 10, .bad = {5}},
        LoaderOptions()
            .batch_size(2)
            .shuffle(false)
            .num_workers(workers)
            .prefetch(4)
            .name("pictures"));
    // Batches before the bad one are delivered, though it was read ahead.
    EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{2, 3}));
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(
          error_of([&] { (void)loader.next(); }),
          AllOf(
              HasSubstr("sample 5 of \"pictures\""),
              HasSubstr("epoch 0, from sample 4"),
              HasSubstr("the disk ate it")));
    }
    EXPECT_EQ(loader.position(), (Position{0, 4}));
    loader.seek({0, 6}); // around it
    EXPECT_EQ(values_of(*loader.next()), (std::vector<int64_t>{6, 7}));
  }
}

TEST(WorkerErrorTest, NamesABatchThatCannotBeCollated) {
  Loader loader(
      Numbers{.count = 10},
      LoaderOptions().batch_size(2).shuffle(false),
      [](const std::vector<at::Tensor>&) -> int {
        throw std::runtime_error("no room");
      });
  EXPECT_THAT(
      error_of([&] { (void)loader.next(); }),
      AllOf(HasSubstr("made of samples 0, 1"), HasSubstr("no room")));
}

TEST(WorkerErrorTest, NamesTheFileThatWasCut) {
  const TempFolder folder;
  const TokenFile file = testing::counting_file(folder / "x.tokens", 100000);
  Loader loader(
      TokenWindows(file, 10),
      LoaderOptions().batch_size(1000).shuffle(false).prefetch(1));
  (void)loader.next();
  std::filesystem::resize_file(folder / "x.tokens", 100000);
  EXPECT_THAT(
      error_of([&] {
        while (loader.next()) {
        }
      }),
      AllOf(HasSubstr("x.tokens"), HasSubstr("cut after it was opened")));
}

/// Rank 1 cannot read sample 9; the ranks train with a collective per step.
void check_error_on_all(const Group& world) {
  // The world is needed to end the test.
  const Group group = world.split(0, world.rank(), "data").value();
  Numbers numbers{.count = 40};
  if (world.rank() == 1) {
    numbers.bad = {9};
  }
  Loader loader(
      numbers,
      LoaderOptions()
          .batch_size(2)
          .shuffle(false)
          .name("pictures")
          .group(group));
  int steps = 0;
  const std::string error = error_of([&] {
    while (const auto batch = loader.next()) {
      group.all_reduce(batch->to(torch::kFloat), ReduceOp::Avg, "gradients");
      ++steps;
    }
  });
  // Of three ranks the second has 2 and 3, then 8 and 9.
  EXPECT_THAT(
      error,
      AllOf(
          HasSubstr("sample 9 of \"pictures\""),
          HasSubstr("the disk ate it"),
          HasSubstr("rank 1")));
  EXPECT_EQ(steps, 1);
  EXPECT_THAT( // dead, with the reason
      error_of([&] { group.barrier(); }),
      HasSubstr("sample 9"));
}

TEST(WorkerErrorTest, ComesOnEveryRankOverSharedMemory) {
  on_ranks(3, check_error_on_all);
}

TEST(WorkerErrorTest, ComesOnEveryRankOverGloo) {
  on_ranks(RanksOptions{.size = 3, .backend = "gloo"}, check_error_on_all);
}

} // namespace
} // namespace tessera::data
