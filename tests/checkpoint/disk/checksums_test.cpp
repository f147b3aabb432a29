#include "checkpoint/disk/checksums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/format/support.h"

namespace tessera::checkpoint {
namespace {

using format::as_bytes;
using format::refusal;
using ::testing::HasSubstr;

// The worked example of docs/formats/checksums.md.
std::string example() {
  return format::read_file(TESSERA_FORMAT_CORPUS "/checksums/abc");
}

TEST(ChecksumsTest, WritesTheWorkedExample) {
  Checksums sums;
  sums.files["__0_0.distcp"] = sums_of(as_bytes("abc"));
  EXPECT_EQ(write_checksums(sums), example());
  EXPECT_EQ(read_checksums(example()), sums);
}

TEST(ChecksumsTest, RejectsEveryFlippedBit) {
  const std::string good = example();
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_NE(refusal([&] { read_checksums(bad); }), "accepted") << bit;
  }
}

TEST(ChecksumsTest, RejectsEveryTruncation) {
  const std::string good = example();
  for (size_t length = 0; length < good.size(); ++length) {
    ASSERT_NE(
        refusal([&] { read_checksums(good.substr(0, length)); }), "accepted")
        << length;
  }
}

TEST(ChecksumsTest, RejectsNamesThatLeaveTheFolder) {
  EXPECT_THAT(
      refusal([] {
        read_checksums(
            format::read_file(TESSERA_FORMAT_CORPUS "/checksums/leaves"));
      }),
      HasSubstr("../secret"));
}

TEST(FileSummerTest, PiecesGiveTheSumsOfTheWhole) {
  std::string bytes(3 * kBlockBytes + 1234, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(i * i >> 7);
  }
  const FileSums whole = sums_of(as_bytes(bytes));
  ASSERT_EQ(whole.blocks.size(), 4);
  EXPECT_EQ(
      whole.blocks[3], checksum(as_bytes(bytes).subspan(3 * kBlockBytes)));
  for (const size_t piece :
       {size_t{1000}, size_t{kBlockBytes}, size_t{1} << 21}) {
    FileSummer summer;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      summer.add(as_bytes(std::string_view(bytes).substr(at, piece)));
    }
    EXPECT_EQ(summer.finish(), whole) << piece;
  }
}

} // namespace
} // namespace tessera::checkpoint
