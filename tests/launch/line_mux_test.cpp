#include "launch/line_mux.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace tessera::launch {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

class LineSplitterTest : public testing::Test {
 protected:
  std::vector<std::string> lines_;
  LineSplitter splitter_{
      [this](std::string_view line) { lines_.emplace_back(line); }};
};

TEST_F(LineSplitterTest, PiecesBecomeWholeLines) {
  splitter_.append("one\ntw");
  EXPECT_THAT(lines_, ElementsAre("one"));
  splitter_.append("o");
  splitter_.append("\n\nthree\nfo");
  EXPECT_THAT(lines_, ElementsAre("one", "two", "", "three"));
  splitter_.finish();
  EXPECT_THAT(lines_, ElementsAre("one", "two", "", "three", "fo"));
  splitter_.finish();
  EXPECT_THAT(lines_, SizeIs(5));
}

TEST_F(LineSplitterTest, EveryCutGivesTheSameLines) {
  const std::string text = "a\nbb\n\nccc\nd";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    lines_.clear();
    splitter_.append(text.substr(0, cut));
    splitter_.append(text.substr(cut));
    splitter_.finish();
    EXPECT_THAT(lines_, ElementsAre("a", "bb", "", "ccc", "d")) << cut;
  }
}

TEST_F(LineSplitterTest, OverlongLineComesInPieces) {
  constexpr size_t kMax = LineSplitter::kMaxLineBytes;
  splitter_.append(std::string(2 * kMax + 10, 'x') + "\nnext\n");
  EXPECT_THAT(
      lines_,
      ElementsAre(
          std::string(kMax, 'x'),
          std::string(kMax, 'x'),
          std::string(10, 'x'),
          "next"));
}

TEST_F(LineSplitterTest, LineOfExactlyTheLimitStaysWhole) {
  constexpr size_t kMax = LineSplitter::kMaxLineBytes;
  splitter_.append(std::string(kMax, 'x') + "\nnext\n");
  EXPECT_THAT(lines_, ElementsAre(std::string(kMax, 'x'), "next"));
}

TEST(LineTailTest, KeepsTheLastLines) {
  LineTail tail;
  for (int i = 0; i < 25; ++i) {
    tail.push(std::to_string(i));
  }
  ASSERT_THAT(tail.lines(), SizeIs(LineTail::kMaxLines));
  EXPECT_EQ(tail.lines().front(), "5");
  EXPECT_EQ(tail.lines().back(), "24");
}

TEST(LineTailTest, CutsLongLines) {
  LineTail tail;
  tail.push(std::string(LineTail::kMaxLineBytes + 1, 'x'));
  EXPECT_EQ(
      tail.lines().front(), std::string(LineTail::kMaxLineBytes, 'x') + " ...");
}

TEST(RankPrefixTest, IsAlignedWithTheLargestRank) {
  EXPECT_EQ(rank_prefix(3, 4), "[3] ");
  EXPECT_EQ(rank_prefix(3, 11), "[ 3] ");
  EXPECT_EQ(rank_prefix(10, 11), "[10] ");
  EXPECT_EQ(rank_prefix(3, 101), "[  3] ");
}

} // namespace
} // namespace tessera::launch
