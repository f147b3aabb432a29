#include <tessera/train/csv_log.h>

#include <cmath>
#include <fstream>

#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "support/warnings.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<std::string> kColumns{"loss", "lr"};

CsvLogOptions from(int64_t step) {
  return CsvLogOptions().resumed_from(step);
}

TEST(CsvLogTest, HasAHeaderAndOneRowPerStep) {
  const TempFolder folder;
  const fs::path path = folder / "run" / "metrics.csv";
  CsvLog log(path, {"loss", "lr", "validation_loss"});
  log.row(1, {5.5, 1e-4, std::nullopt});
  log.row(2, {0.1, std::nan(""), -HUGE_VAL});
  log.row(10, {1.0 / 3, 1e300, 2});
  EXPECT_EQ(
      read_bytes(path),
      "step,loss,lr,validation_loss\n"
      "1,5.5,1e-04,\n"
      "2,0.1,nan,-inf\n"
      "10,0.3333333333333333,1e+300,2\n");
}

TEST(CsvLogTest, AResumeCutsTheStepsThatAreMadeAgain) {
  const TempFolder folder;
  const fs::path path = folder / "metrics.csv";
  {
    CsvLog log(path, kColumns);
    for (int64_t step = 1; step <= 7; ++step) {
      log.row(step, {1, 0});
    }
  }
  {
    CsvLog log(path, kColumns, from(4));
    EXPECT_EQ(read_bytes(path), "step,loss,lr\n1,1,0\n2,1,0\n3,1,0\n4,1,0\n");
    log.row(5, {2, 0});
  }
  {
    CsvLog log(path, kColumns, from(5)); // nothing to cut
    log.row(6, {3, 0});
  }
  EXPECT_EQ(
      read_bytes(path),
      "step,loss,lr\n1,1,0\n2,1,0\n3,1,0\n4,1,0\n5,2,0\n6,3,0\n");
  CsvLog log(path, kColumns); // from the start
  EXPECT_EQ(read_bytes(path), "step,loss,lr\n");
}

TEST(CsvLogTest, ATornRowIsRemoved) {
  const TempFolder folder;
  const fs::path path = folder / "metrics.csv";
  const std::string whole = "step,loss,lr\n1,1,0\n2,1,0\n";
  // At every place where a kill could have cut the file.
  for (size_t size = 0; size <= whole.size(); ++size) {
    write_bytes(path, whole.substr(0, size));
    const Warnings warnings;
    CsvLog log(path, kColumns, from(2));
    log.row(3, {3, 0});
    const size_t kept =
        size < 13 ? 0 : whole.rfind('\n', size == 0 ? 0 : size - 1) + 1;
    const std::string expected =
        (kept == 0 ? "step,loss,lr\n" : whole.substr(0, kept)) + "3,3,0\n";
    EXPECT_EQ(read_bytes(path), expected) << size;
    EXPECT_THAT(warnings.texts, IsEmpty());
  }
}

TEST(CsvLogTest, ATableWithOtherColumnsIsKeptBeside) {
  const TempFolder folder;
  const fs::path path = folder / "metrics.csv";
  const Warnings warnings;
  for (const char* text : {"a,b\n1,2\n", "c,d\n3,4\n"}) {
    write_bytes(path, text);
    CsvLog log(path, kColumns, from(9));
    log.row(10, {1, 0});
    EXPECT_EQ(read_bytes(path), "step,loss,lr\n10,1,0\n");
  }
  EXPECT_EQ(read_bytes(path.string() + ".old"), "a,b\n1,2\n");
  EXPECT_EQ(read_bytes(path.string() + ".old2"), "c,d\n3,4\n");
  ASSERT_EQ(warnings.texts.size(), 2);
  EXPECT_THAT(warnings.texts[1], HasSubstr("metrics.csv.old2"));
}

TEST(CsvLogTest, AFullDiskIsWarnedOfOnceAndTrainingGoesOn) {
  const TempFolder folder;
  fs::create_symlink("/dev/full", folder / "metrics.csv");
  const Warnings warnings;
  CsvLog log(folder / "metrics.csv", kColumns);
  EXPECT_FALSE(log.is_writing());
  log.row(1, {1, 0});
  log.row(2, {1, 0});
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_THAT(warnings.texts[0], HasSubstr("No space left"));
  EXPECT_THAT(warnings.texts[0], HasSubstr("Training continues"));
}

TEST(CsvLogTest, RejectsOnEveryRankWhatWouldBreakTheTable) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const fs::path path = folder / "metrics.csv";
    for (const char* name : {"", "a,b", "a\"", "a\nb"}) {
      EXPECT_THAT(
          error_of([&] {
            CsvLog(path, {"loss", name});
          }),
          HasSubstr("cannot name a column"));
    }
    EXPECT_THAT(error_of([&] { CsvLog(path, {}); }), HasSubstr("no columns"));
    CsvLog log(path, kColumns, from(3));
    EXPECT_EQ(log.is_writing(), world.rank() == 0);
    EXPECT_THAT(
        error_of([&] { log.row(4, {1}); }),
        HasSubstr("1 values for 2 columns"));
    log.row(4, {world.rank(), 0});
    for (const int64_t step : {3, 4}) {
      EXPECT_THAT(
          error_of([&] {
            log.row(step, {1, 2});
          }),
          HasSubstr("comes after step 4"));
    }
    world.barrier();
    EXPECT_EQ(read_bytes(path), "step,loss,lr\n4,0,0\n");
  });
}

} // namespace
} // namespace tessera
