#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "checkpoint/disk/handmade.h"
#include "checkpoint/tools/ckpt.h"

namespace tessera::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class VerifyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    HandmadeDcp dcp(folder_ / "d", {900'000});
    dcp.add_rows("a", 0, 300'000); // two blocks
    dcp.add_rows("b", 300'000, 600'000); // three
    dcp.write();
    dcp.write_checksums();
  }

  std::string damages() const {
    const auto result = ckpt({"verify", folder_ / "d"});
    EXPECT_EQ(result.exit_code, 1) << result.output;
    return result.output;
  }

  const ScratchFolder folder_;
};

TEST_F(VerifyTest, SaysWhatIsSound) {
  const auto result = ckpt({"verify", folder_ / "d"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("sound: DCP, 1 tensor, 0 other values, 2 files"),
          HasSubstr("compared with their checksums")));
}

TEST_F(VerifyTest, NamesEveryDamageAndWhatLiesThere) {
  flip_bit(folder_ / "d/a", 100);
  flip_bit(folder_ / "d/b", 1'500'000);
  flip_bit(folder_ / "d/b", 2'300'000); // the next block
  EXPECT_THAT(
      damages(),
      AllOf(
          HasSubstr("/d/a\": bytes 0 to 1048576 are not"),
          HasSubstr("/d/b\": bytes 1048576 to "),
          HasSubstr("there lies \"w\""),
          HasSubstr("2 damages found")));
}

// Each bit of the first and last bytes, and some between.
TEST_F(VerifyTest, FindsAFlippedBitAnywhere) {
  for (const std::string file : {"a", "b", ".metadata", ".checksums"}) {
    const auto bytes =
        static_cast<int64_t>(fs::file_size(folder_ / "d" / file));
    for (const int64_t place : {int64_t{0}, bytes / 3, bytes / 2, bytes - 1}) {
      flip_bit(folder_ / "d" / file, place);
      EXPECT_THAT(damages(), HasSubstr("/d/" + file)) << file << " " << place;
      flip_bit(folder_ / "d" / file, place);
    }
  }
  EXPECT_EQ(ckpt({"verify", folder_ / "d"}).exit_code, 0);
}

TEST_F(VerifyTest, FindsCutAndMissingFiles) {
  fs::resize_file(folder_ / "d/a", 1000);
  EXPECT_THAT(
      damages(),
      AllOf(
          HasSubstr("/d/a\""),
          HasSubstr("1000 bytes"),
          HasSubstr("were written")));
  fs::remove(folder_ / "d/b");
  EXPECT_THAT(
      damages(),
      AllOf(
          HasSubstr("1000 bytes"), HasSubstr("/d/b\": this file is missing")));
}

TEST_F(VerifyTest, ChecksTheStructureWithoutChecksums) {
  fs::remove(folder_ / "d/.checksums");
  const auto sound = ckpt({"verify", folder_ / "d"});
  EXPECT_EQ(sound.exit_code, 0);
  EXPECT_THAT(sound.output, HasSubstr("there are no checksums"));
  // The end of the archive's directory.
  flip_bit(
      folder_ / "d/b",
      static_cast<int64_t>(fs::file_size(folder_ / "d/b")) - 22);
  EXPECT_THAT(
      damages(), AllOf(HasSubstr("item of \"w\""), Not(HasSubstr("/d/a"))));
}

// A checkpoint that is sound but uses something that is not supported must not
// be thrown away.
TEST_F(VerifyTest, TellsUnsupportedFromDamaged) {
  const std::string header =
      R"({"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})";
  std::string bytes;
  format::append_number(&bytes, static_cast<uint64_t>(header.size()));
  const fs::path path = folder_ / "new.safetensors";
  format::write_file(path, bytes + header + "x");
  format::write_file(folder_ / "old.pt", std::string("\x80\x02\x8a\x0al"));
  for (const std::string name : {"new.safetensors", "old.pt"}) {
    const auto result = ckpt({"verify", folder_ / name});
    EXPECT_EQ(result.exit_code, 3) << result.output;
    EXPECT_THAT(
        result.output,
        AllOf(
            HasSubstr("UNSUPPORTED  "),
            HasSubstr(name),
            HasSubstr("No damage was found"),
            Not(HasSubstr("DAMAGED  "))));
  }
  format::write_file( // cut off; the header is as long
      path,
      bytes + R"({"w":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})");
  EXPECT_EQ(ckpt({"verify", path}).exit_code, 1);
}

TEST_F(VerifyTest, LeavesOutWhatIsExcluded) {
  flip_bit(folder_ / "d/a", 100);
  EXPECT_EQ(ckpt({"verify", folder_ / "d", "--exclude", "x"}).exit_code, 1);
  EXPECT_EQ(ckpt({"verify", folder_ / "d", "--exclude", "w"}).exit_code, 0);
  flip_bit(folder_ / "d/.metadata", 5); // of which everything depends
  EXPECT_EQ(ckpt({"verify", folder_ / "d", "--exclude", "w"}).exit_code, 1);
}

TEST_F(VerifyTest, SpeaksJson) {
  const auto read = [&](int code) {
    const auto result = ckpt({"verify", folder_ / "d", "--json"});
    EXPECT_EQ(result.exit_code, code) << result.output;
    return nlohmann::json::parse(result.output);
  };
  auto json = read(0);
  EXPECT_EQ(json.at("verdict"), "sound");
  EXPECT_EQ(json.at("format"), "DCP");
  EXPECT_EQ(json.at("num_tensors"), 1);
  EXPECT_EQ(json.at("has_checksums"), true);
  EXPECT_TRUE(json.at("damages").empty());
  flip_bit(folder_ / "d/a", 100);
  json = read(1);
  EXPECT_EQ(json.at("verdict"), "damaged");
  ASSERT_EQ(json.at("damages").size(), 1U);
  EXPECT_THAT(json.at("damages")[0].get<std::string>(), HasSubstr("\"w\""));
  EXPECT_TRUE(json.at("unsupported").empty());
}

TEST_F(VerifyTest, ReadsEveryFormat) {
  for (const std::string name : {"plain", "kinds.safetensors", "weights.pt"}) {
    const auto result = ckpt({"verify", kGoldens + "/" + name});
    EXPECT_EQ(result.exit_code, 0) << result.output;
  }
  EXPECT_EQ(ckpt({"verify", folder_ / "gone"}).exit_code, 2);
}

} // namespace
} // namespace tessera::checkpoint
