#include "report/named_runs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "report/report_error.h"
#include "report/support.h"

namespace tessera::report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class NamedRunsTest : public ::testing::Test {
 protected:
  /// A run in the folder `place`, which is called `name`.
  std::filesystem::path add(
      const std::string& place,
      const std::string& name = "") {
    const std::filesystem::path folder = folder_ / place;
    std::filesystem::create_directories(folder);
    nlohmann::json start{{"kind", "start"}};
    if (!name.empty()) {
      start["name"] = name;
    }
    write_file(folder / "log.jsonl", start.dump() + "\n");
    return folder;
  }

  std::string error_of(const std::vector<std::filesystem::path>& folders) {
    try {
      read_runs(folders);
    } catch (const ReportError& error) {
      return error.what();
    }
    return "no error";
  }

  ScratchFolder folder_;
};

TEST_F(NamedRunsTest, AreCalledByTheirNamesElseByTheirFolders) {
  const auto runs = read_runs({add("a", "first"), add("b"), add("c") / ""});
  ASSERT_THAT(runs, SizeIs(3));
  EXPECT_EQ(runs[0].label, "first");
  EXPECT_EQ(runs[1].label, "b");
  EXPECT_EQ(runs[2].label, "c"); // given as "c/"
}

TEST_F(NamedRunsTest, EqualNamesHaveTheirFolders) {
  const auto a = add("a", "same");
  const auto b = add("b", "same");
  const auto runs = read_runs(
      {a,
       b,
       add("c", "other"),
       add("d", "same (" + a.string() + ")"),
       add("e/same")});
  EXPECT_EQ(runs[0].label, "same (" + a.string() + ")");
  EXPECT_EQ(runs[1].label, "same (" + b.string() + ")");
  EXPECT_EQ(runs[2].label, "other");
  EXPECT_EQ(runs[3].label, runs[0].label + "'");
  EXPECT_EQ(runs[4].label, "same (" + (folder_ / "e/same").string() + ")");
}

TEST_F(NamedRunsTest, TheLogMayBeGivenForItsFolder) {
  const auto a = add("a");
  const auto runs = read_runs({a / "log.jsonl"});
  EXPECT_EQ(runs[0].folder, a);
  EXPECT_EQ(runs[0].label, "a");
}

TEST_F(NamedRunsTest, RejectsARunThatIsNamedTwice) {
  const auto a = add("a");
  add("b");
  std::filesystem::create_directory_symlink("a", folder_ / "link");
  for (const std::filesystem::path& again :
       {a, a / "log.jsonl", a / "../a", folder_ / "link"}) {
    EXPECT_THAT(
        error_of({a, folder_ / "b", again}),
        AllOf(
            HasSubstr("\"" + a.string() + "\" and "),
            HasSubstr("are the same run. Name each run once.")));
  }
}

TEST_F(NamedRunsTest, RejectsNoRunTooManyAndOneWithoutALog) {
  EXPECT_THAT(
      error_of({}), HasSubstr("0 runs were named; a page shows 1 to 8"));
  EXPECT_THAT(
      error_of(std::vector<std::filesystem::path>(9, add("a"))),
      HasSubstr("9 runs were named"));
  EXPECT_THAT(
      error_of({folder_ / "a", folder_ / "none"}),
      HasSubstr("there is no \"" + (folder_ / "none/log.jsonl").string()));
}

} // namespace
} // namespace tessera::report
