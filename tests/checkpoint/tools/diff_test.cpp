#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

#include "checkpoint/disk/handmade.h"
#include "checkpoint/tools/ckpt.h"

namespace tessera::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class DiffTest : public ::testing::Test {
 protected:
  // A torch file with "w" of these elements, and more.
  fs::path write(
      const std::string& name,
      std::vector<float> elements,
      const format::Dict& more = {}) const {
    std::string bytes;
    for (const float element : elements) {
      format::append_number(&bytes, element);
    }
    const auto numel = static_cast<int64_t>(elements.size());
    format::Dict root = more;
    root.add("w", float_tensor({2, numel / 2}, numel));
    format::write_file(folder_ / name, torch_file(root, bytes));
    return folder_ / name;
  }

  const ScratchFolder folder_;
};

TEST_F(DiffTest, SameIsSame) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const auto a = write("a.pt", {1, 2, kNan, -0.0F});
  const auto b = write("b.pt", {1, 2, kNan, -0.0F});
  const auto result = ckpt({"diff", a, b});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("1 the same, 0 different"));
}

TEST_F(DiffTest, ShowsTheFirstDifferencesAndTheLargest) {
  const auto a = write("a.pt", {1, 2, 3, 4, 5, 6});
  const auto b = write("b.pt", {1, 2.5, 3, 4, 1, 6});
  const auto result = ckpt({"diff", a, b});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("w: 2 of 6 elements differ, max abs 4, max rel 0.8\n"),
          HasSubstr("    at [0, 1]: 2 against 2.5\n"),
          HasSubstr("    at [1, 1]: 5 against 1\n"),
          HasSubstr("0 the same, 1 different")));
}

TEST_F(DiffTest, EveryBitCountsWithoutATolerance) {
  const auto a = write("a.pt", {0.0F, 1});
  const auto b = write("b.pt", {-0.0F, 1});
  EXPECT_EQ(ckpt({"diff", a, b}).exit_code, 1);
  EXPECT_EQ(ckpt({"diff", a, b, "--atol", "0"}).exit_code, 0);
}

TEST_F(DiffTest, Tolerates) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto a = write("a.pt", {100, 2, kNan, kInf});
  const auto b = write("b.pt", {101, 2, kNan, kInf});
  EXPECT_EQ(ckpt({"diff", a, b, "--rtol", "0.01"}).exit_code, 0);
  EXPECT_EQ(ckpt({"diff", a, b, "--rtol", "0.009"}).exit_code, 1);
  EXPECT_EQ(ckpt({"diff", a, b, "--atol", "1"}).exit_code, 0);
  const auto c = write("c.pt", {100, 2, 3, kInf});
  const auto result = ckpt({"diff", a, c, "--atol", "1e9"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("nan against 3"));
}

TEST_F(DiffTest, NanEqualsNanWhenAsked) {
  const float quiet = std::numeric_limits<float>::quiet_NaN();
  const float negative = std::copysign(quiet, -1.0F); // other bits
  format::Dict nan;
  nan.add("loss", std::numeric_limits<double>::quiet_NaN());
  const auto a = write("a.pt", {1, quiet}, nan);
  const auto b = write("b.pt", {1, negative}, nan);
  const auto bits = ckpt({"diff", a, b});
  EXPECT_EQ(bits.exit_code, 1);
  EXPECT_THAT(bits.output, HasSubstr("w: 1 of 2 elements differ"));
  const auto asked = ckpt({"diff", a, b, "--equal-nan"});
  EXPECT_EQ(asked.exit_code, 0) << asked.output;
  const auto c = write("c.pt", {1, 3}, nan); // a number is none
  EXPECT_EQ(ckpt({"diff", a, c, "--equal-nan"}).exit_code, 1);
}

TEST_F(DiffTest, LeavesOutWhatIsExcluded) {
  format::Dict more;
  more.add("epoch", 3);
  more.add("epochs", 1);
  format::Dict other;
  other.add("epoch", 4);
  other.add("epochs", 1);
  other.add("extra", 1);
  const auto a = write("a.pt", {1, 2}, more);
  const auto b = write("b.pt", {1, 2}, other);
  const auto result =
      ckpt({"diff", a, b, "--exclude", "epoch", "--exclude", "extra"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("2 the same, 0 different, 2 left out"));
  EXPECT_EQ(ckpt({"diff", a, b, "--exclude", "epoc"}).exit_code, 1);
}

TEST_F(DiffTest, SpeaksJson) {
  const auto a = write("a.pt", {1, 2, 3, 4});
  const auto b = write("b.pt", {1, 2, 3, 6});
  const auto result = ckpt({"diff", a, b, "--json"});
  EXPECT_EQ(result.exit_code, 1);
  const auto json = nlohmann::json::parse(result.output);
  EXPECT_EQ(json.at("same"), 0);
  EXPECT_EQ(json.at("different"), 1);
  EXPECT_EQ(json.at("excluded"), 0);
  const auto& difference = json.at("differences").at(0);
  EXPECT_EQ(difference.at("name"), "w");
  EXPECT_EQ(difference.at("num_different"), 1);
  EXPECT_EQ(difference.at("num_elements"), 4);
  EXPECT_EQ(difference.at("max_abs"), 2.0);
  const auto same =
      nlohmann::json::parse(ckpt({"diff", a, a, "--json"}).output);
  EXPECT_EQ(same.at("same"), 1);
  EXPECT_TRUE(same.at("differences").empty());
}

TEST_F(DiffTest, NamesWhatIsOnOneSideOnly) {
  format::Dict more;
  more.add("epoch", 3);
  const auto a = write("a.pt", {1, 2}, more);
  format::Dict other;
  other.add("step", 3);
  const auto b = write("b.pt", {1, 2, 3, 4}, other);
  const auto result = ckpt({"diff", a, b});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("epoch: only in the first"),
          HasSubstr("step: only in the second"),
          HasSubstr("w: float32 [2, 1] against float32 [2, 2]")));
}

TEST_F(DiffTest, ComparesValues) {
  format::Dict more;
  more.add("epoch", 3);
  format::Dict other;
  other.add("epoch", 4);
  const auto result =
      ckpt({"diff", write("a.pt", {1, 2}, more), write("b.pt", {1, 2}, other)});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("epoch: 3 against 4"));
}

TEST_F(DiffTest, ComparesFormatsAndDtypes) {
  const auto a = write("a.pt", {1, 2});
  const fs::path half = folder_ / "half";
  ASSERT_EQ(
      ckpt({"convert", a, half, "--to", "dcp", "--dtype", "bf16"}).exit_code,
      0);
  const auto exact = ckpt({"diff", a, half});
  EXPECT_EQ(exact.exit_code, 1);
  EXPECT_THAT(
      exact.output, HasSubstr("float32 [2, 1] against bfloat16 [2, 1]"));
  EXPECT_EQ(ckpt({"diff", a, half, "--rtol", "1e-6"}).exit_code, 0);
}

TEST_F(DiffTest, AnErrorIsNoDifference) {
  EXPECT_EQ(ckpt({"diff", folder_ / "a", folder_ / "b"}).exit_code, 2);
}

} // namespace
} // namespace tessera::checkpoint
