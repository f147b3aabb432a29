#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "checkpoint/disk/handmade.h"
#include "checkpoint/tools/ckpt.h"

namespace tessera::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(InspectTest, ShowsTheTreeAndTotals) {
  const auto result = ckpt({"inspect", kGoldens + "/plain"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("plain: DCP\n"),
          ContainsRegex("\n  model\n    w +float32  \\[2, 3\\]  24 bytes\n"),
          ContainsRegex("\n    param_groups\n      0\n        lr += 0.1\n"),
          ContainsRegex("\n  epoch += 4\n"),
          HasSubstr("  odd name, ünïcode  bool"),
          ContainsRegex("5 tensors with 11 elements, 34 bytes"),
          HasSubstr("3 other values; 1 file")));
}

TEST(InspectTest, ShowsBoxesAndTheirFiles) {
  const ScratchFolder folder;
  HandmadeDcp dcp(folder / "d", {5, 3});
  dcp.add_rows("__0_0.distcp", 0, 3);
  dcp.add_rows("__1_0.distcp", 3, 2);
  dcp.write();
  dcp.write_checksums();
  EXPECT_THAT(
      ckpt({"inspect", folder / "d"}).output,
      AllOf(
          HasSubstr("2 boxes  __0_0.distcp and 1 other file"),
          HasSubstr("with checksums"),
          HasSubstr("A box is the part of a tensor that one rank saved.")));
  EXPECT_THAT(
      ckpt({"inspect", folder / "d", "--summary"}).output,
      Not(HasSubstr("A box is"))); // no box is named
  EXPECT_THAT(
      ckpt({"inspect", folder / "d", "--boxes"}).output,
      HasSubstr("box [2, 3] at [3, 0]  __1_0.distcp, bytes 0 to"));

  const auto json =
      nlohmann::json::parse(ckpt({"inspect", folder / "d", "--json"}).output);
  EXPECT_EQ(json["format"], "DCP");
  EXPECT_EQ(json["has_checksums"], true);
  EXPECT_EQ(json["tensor_bytes"], 60);
  EXPECT_EQ(json["tensors"][0]["boxes"][1]["file"], "__1_0.distcp");
  EXPECT_EQ(
      json["tensors"][0]["boxes"][1]["offsets"], (std::vector<int64_t>{3, 0}));
}

TEST(InspectTest, AddsUpWhatIsBelowADepth) {
  const auto result = ckpt({"inspect", kGoldens + "/plain", "--depth", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          ContainsRegex("\n  model +\\.\\.\\. 2 tensors, "),
          ContainsRegex("\n  epoch += 4\n"),
          HasSubstr("5 tensors with 11 elements, 34 bytes")));
  EXPECT_THAT(result.output, Not(HasSubstr("param_groups\n")));
}

TEST(InspectTest, SumsUpWithoutNames) {
  const auto result = ckpt({"inspect", kGoldens + "/plain", "--summary"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("5 tensors with 11 elements, 34 bytes"));
  EXPECT_THAT(result.output, Not(HasSubstr("model")));
  EXPECT_EQ(
      ckpt({"inspect", kGoldens + "/plain", "--summary", "--depth", "2"})
          .exit_code,
      2);
}

TEST(InspectTest, ReadsEveryFormat) {
  for (const std::string name :
       {"kinds.safetensors", "kinds.pt", "model.safetensors.index.json"}) {
    const auto result = ckpt({"inspect", kGoldens + "/" + name});
    EXPECT_EQ(result.exit_code, 0) << result.output;
    const auto json = nlohmann::json::parse(
        ckpt({"inspect", kGoldens + "/" + name, "--json"}).output);
    EXPECT_FALSE(json["tensors"].empty());
  }
}

TEST(InspectTest, RejectsWhatIsNoCheckpoint) {
  const auto result = ckpt({"inspect", "/nowhere"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("tessera ckpt inspect: \"/nowhere\""));
}

} // namespace
} // namespace tessera::checkpoint
