#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "checkpoint/format/support.h"
#include "checkpoint/format/zip_archive.h"
#include "checkpoint/format/zip_reader.h"

namespace tessera::format {
namespace {

using testing::HasSubstr;

std::string refused(const ZipArchive& archive) {
  const auto bytes = archive.bytes();
  return refusal([&] { read_zip(as_bytes(bytes)); });
}

TEST(ZipReaderTest, ReadsStoredEntries) {
  for (const bool zip64 : {false, true}) {
    const ZipArchive archive{
        .entries =
            {{.name = "a/one", .data = "first", .wide = zip64},
             {.name = "a/two", .data = ""}},
        .zip64 = zip64,
        .comment = zip64 ? "" : "a comment"};
    const auto bytes = archive.bytes();
    const auto entries = read_zip(as_bytes(bytes));
    ASSERT_EQ(entries.size(), 2u);
    EXPECT_EQ(entries[0].name, "a/one");
    EXPECT_EQ(entries[0].size, 5u);
    EXPECT_EQ(bytes.substr(entries[0].offset, 5), "first");
    EXPECT_EQ(entries[1].name, "a/two");
    EXPECT_EQ(entries[1].size, 0u);
  }
}

TEST(ZipReaderTest, ReadsAnEmptyArchive) {
  const auto bytes = ZipArchive{}.bytes();
  EXPECT_TRUE(read_zip(as_bytes(bytes)).empty());
}

TEST(ZipReaderTest, RejectsWhatTorchDoesNotWrite) {
  using A = ZipArchive;
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a", .method = 8}}}),
      HasSubstr("entry \"a\" is compressed"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a", .flags = 1}}}),
      HasSubstr("is encrypted"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "../a"}}}),
      HasSubstr("leaves its folder"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "/a"}}}), HasSubstr("is absolute"));
  EXPECT_THAT(refused(A{.entries = {{.name = ""}}}), HasSubstr("is empty"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a\xff"}}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a"}, {.name = "a"}}}),
      HasSubstr("entry \"a\" appears twice"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a"}}, .disk = 1}), HasSubstr("split"));
}

TEST(ZipReaderTest, RejectsPlacesOutsideOfTheArchive) {
  using A = ZipArchive;
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a", .data = "x", .grow = 1}}}),
      HasSubstr("lies outside the archive"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a", .wide = true, .grow = -1}}}),
      HasSubstr("lies outside the archive"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a", .wide = true, .move = -1}}}),
      HasSubstr("lies outside the archive"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a", .move = 1}}}),
      HasSubstr("lies outside the archive"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a", .local_name = "b"}}}),
      HasSubstr("lies outside the archive"));
  EXPECT_THAT(
      refused(
          A{.entries =
                {{.name = "a", .data = "xyz", .grow = 40},
                 {.name = "b", .data = std::string(50, 'x')}}}),
      HasSubstr("entries \"a\" and \"b\" overlap"));
  EXPECT_THAT(
      refused(A{.entries = {{.name = "a"}}, .extra_count = 1}),
      HasSubstr("1 entries, 2 are promised"));
  EXPECT_THAT(
      refused(
          A{.entries = {{.name = "a"}}, .zip64 = true, .extra_count = 1 << 30}),
      HasSubstr("are promised"));
}

TEST(ZipReaderTest, RejectsWhatIsNoArchive) {
  EXPECT_THAT(
      refusal([] { read_zip(ByteSpan()); }),
      HasSubstr("this is not a ZIP archive"));
  const std::string text(1000, 'x');
  EXPECT_THAT(
      refusal([&] { read_zip(as_bytes(text)); }),
      HasSubstr("this is not a ZIP archive"));
}

TEST(ZipReaderTest, SurvivesAnyChangeOfAByte) {
  const auto good =
      ZipArchive{
          .entries = {{.name = "a/one", .data = "first", .wide = true}},
          .zip64 = true}
          .bytes();
  for (size_t i = 0; i < good.size(); ++i) {
    for (int value = 0; value < 256; ++value) {
      auto bytes = good;
      bytes[i] = static_cast<char>(value);
      refusal([&] { read_zip(as_bytes(bytes)); });
    }
  }
}

} // namespace
} // namespace tessera::format
