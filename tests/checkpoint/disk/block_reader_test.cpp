#include "checkpoint/disk/block_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "checkpoint/disk/handmade.h"
#include "checkpoint/disk/scratch_folder.h"
#include "checkpoint/disk/source.h"
#include "support/errors.h"

namespace tessera::checkpoint {
namespace {

using tessera::testing::error_of;
using ::testing::HasSubstr;

void flip_bit(const fs::path& path, uint64_t place) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(place));
  const int byte = file.get();
  file.seekp(static_cast<std::streamoff>(place));
  file.put(static_cast<char>(byte ^ 4));
}

class BlockReaderTest : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 900'000; // 3.4 MiB, in four blocks

  void SetUp() override {
    HandmadeDcp dcp(folder_ / "d", {kRows});
    dcp.add_rows("f", 0, kRows);
    dcp.write();
    dcp.write_checksums();
  }

  std::string file_bytes() const {
    return format::read_file(folder_ / "d/f");
  }

  const ScratchFolder folder_;
};

TEST_F(BlockReaderTest, ReadsAnyRange) {
  const auto source = Source::open(folder_ / "d");
  const std::string all = file_bytes();
  for (const bool verify : {true, false}) {
    BlockReader reader(*source, verify);
    for (const uint64_t begin :
         {uint64_t{0}, kBlockBytes - 1, kBlockBytes, 2 * kBlockBytes + 17}) {
      for (const uint64_t count :
           {uint64_t{0},
            uint64_t{1},
            uint64_t{70'000},
            kBlockBytes,
            all.size() - begin}) {
        std::string read(count, '\0');
        reader.read(0, begin, reinterpret_cast<uint8_t*>(read.data()), count);
        EXPECT_TRUE(read == all.substr(begin, count))
            << begin << " " << count << " " << verify;
      }
    }
  }
}

TEST_F(BlockReaderTest, NamesTheBlockThatIsDamaged) {
  flip_bit(folder_ / "d/f", kBlockBytes + 5);
  const auto source = Source::open(folder_ / "d");
  BlockReader reader(*source);
  std::string to(2 * kBlockBytes, '\0');
  auto* bytes = reinterpret_cast<uint8_t*>(to.data());
  reader.read(0, 10, bytes, 1000); // elsewhere
  const std::string message =
      error_of([&] { reader.read(0, 0, bytes, 2 * kBlockBytes); });
  EXPECT_THAT(message, HasSubstr("d/f\": bytes 1048576 to 2097152 are not"));
  EXPECT_THROW(reader.read(0, kBlockBytes + 90, bytes, 1), DamageError);
  // A block is not trusted because it was kept.
  EXPECT_THROW(reader.read(0, kBlockBytes + 90, bytes, 1), DamageError);
  EXPECT_THROW(reader.check(0, kBlockBytes - 1, kBlockBytes + 1), DamageError);
  EXPECT_NO_THROW(BlockReader(*source, false).read(0, 0, bytes, to.size()));
}

// Every bit of an item counts, also those that only describe the data.
TEST_F(BlockReaderTest, SurvivesNoFlippedBitOfAnItem) {
  const uint64_t size = file_bytes().size();
  for (const uint64_t place :
       {uint64_t{40},
        uint64_t{100},
        kBlockBytes,
        size / 2,
        size - 400,
        size - 1}) {
    flip_bit(folder_ / "d/f", place);
    const auto source = Source::open(folder_ / "d");
    EXPECT_THROW(read_tensor(*source, "w"), FileError) << place;
    flip_bit(folder_ / "d/f", place);
  }
  EXPECT_EQ(read_tensor(*Source::open(folder_ / "d"), "w"), counting(0, kRows));
}

TEST_F(BlockReaderTest, RejectsBytesBehindTheEnd) {
  const auto source = Source::open(folder_ / "d");
  BlockReader reader(*source);
  uint8_t byte = 0;
  EXPECT_THAT(
      error_of([&] { reader.read(0, file_bytes().size(), &byte, 1); }),
      HasSubstr("1 bytes are promised"));
  EXPECT_THAT(
      error_of([&] { reader.read(0, UINT64_MAX, &byte, 2); }),
      HasSubstr("the file ends at"));
}

TEST_F(BlockReaderTest, RejectsAFileThatShrankMeanwhile) {
  const auto source = Source::open(folder_ / "d");
  fs::resize_file(folder_ / "d/f", 100);
  EXPECT_THAT(
      error_of([&] { read_tensor(*source, "w"); }),
      HasSubstr("Is it being written?"));
}

} // namespace
} // namespace tessera::checkpoint
