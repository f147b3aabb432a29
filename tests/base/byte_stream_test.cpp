#include "base/byte_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::ElementsAre;

std::vector<uint8_t> sample() {
  ByteWriter writer;
  writer.byte(7);
  writer.number(-3);
  writer.number(2.5);
  writer.text("abc");
  writer.numbers(std::vector<int64_t>{1, -2});
  return writer.take();
}

void read_sample(ByteReader reader) {
  EXPECT_EQ(reader.byte(), 7);
  EXPECT_EQ(reader.number<int64_t>(), -3);
  EXPECT_EQ(reader.number<double>(), 2.5);
  EXPECT_EQ(reader.text(), "abc");
  EXPECT_THAT(reader.numbers(), ElementsAre(1, -2));
  EXPECT_EQ(reader.left(), 0u);
}

TEST(ByteStreamTest, ReadsWhatWasWritten) {
  read_sample(ByteReader(sample()));
}

TEST(ByteStreamTest, EveryNumberHasEightBytes) {
  ByteWriter writer;
  writer.number(uint32_t{5});
  writer.number(true);
  EXPECT_EQ(writer.take().size(), 16u);
}

TEST(ByteStreamTest, RejectsEveryCut) {
  const std::vector<uint8_t> bytes = sample();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto part = std::span(bytes).first(size);
    EXPECT_THROW(read_sample(ByteReader(part)), BadBytes) << size;
  }
}

TEST(ByteStreamTest, RejectsACountBeyondTheEndBeforeItAllocates) {
  ByteWriter writer;
  writer.number(~uint64_t{0});
  const auto bytes = writer.take();
  EXPECT_THROW(ByteReader(bytes).text(), BadBytes);
  EXPECT_THROW(ByteReader(bytes).numbers(), BadBytes);
}

TEST(ByteStreamTest, ErrorsNameTheByte) {
  const std::vector<uint8_t> bytes(11);
  ByteReader reader(bytes);
  reader.number();
  try {
    reader.number();
    FAIL() << "nothing was thrown";
  } catch (const BadBytes& error) {
    EXPECT_STREQ(error.what(), "byte 8: 8 bytes expected, 3 are left.");
  }
}

TEST(ByteStreamTest, AppendsToTextsWithTheWidthOfTheType) {
  std::string bytes;
  append_number<uint8_t>(bytes, 1);
  append_number<uint32_t>(bytes, 2);
  append_text(bytes, "x");
  EXPECT_EQ(bytes.size(), 1u + 4 + 8 + 1);
  EXPECT_EQ(bytes.back(), 'x');
}

} // namespace
} // namespace tessera
