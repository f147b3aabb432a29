// `tessera ckpt` on archives of torch.export.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "checkpoint/disk/python.h"
#include "checkpoint/format/support.h"
#include "checkpoint/tools/ckpt.h"

namespace tessera::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

const std::string kTiny = kGoldens + "/tiny.pt2";

TEST(ExportedTest, InspectShowsWeightsAndPrograms) {
  const auto result = ckpt({"inspect", kTiny, "--boxes"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("tiny.pt2: exported program\n"),
          ContainsRegex("\n  weight +float32  \\[1, 2\\]  8 bytes\n"),
          ContainsRegex("\n  bias +float32  \\[1\\]  4 bytes\n"),
          ContainsRegex("box \\[1, 2\\] at \\[0, 0\\]  tiny.pt2, bytes"),
          HasSubstr("note \"program model\": \"1 node, torch 2."),
          HasSubstr("2 tensors with 3 elements, 12 bytes")));
}

TEST(ExportedTest, AnArchiveIsKnownWithoutItsEnding) {
  const ScratchFolder folder;
  std::filesystem::copy_file(kTiny, folder / "model.bin");
  EXPECT_THAT(
      ckpt({"inspect", folder / "model.bin"}).output,
      HasSubstr("model.bin: exported program\n"));
}

TEST(ExportedTest, VerifyTellsSoundFromDamagedAndUnsupported) {
  const auto sound = ckpt({"verify", kTiny});
  EXPECT_EQ(sound.exit_code, 0);
  EXPECT_THAT(sound.output, HasSubstr("exported program, 2 tensors"));

  const ScratchFolder folder;
  const auto bytes = format::read_file(kTiny);
  format::write_file(folder / "cut.pt2", bytes.substr(0, bytes.size() / 2));
  const auto cut = ckpt({"verify", folder / "cut.pt2"});
  EXPECT_EQ(cut.exit_code, 1);
  EXPECT_THAT(
      cut.output,
      AllOf(HasSubstr("DAMAGED"), HasSubstr("cut.pt2"), HasSubstr("cut off")));

  auto other = bytes;
  const auto version = other.find("\"major\":8");
  ASSERT_NE(version, other.npos);
  other[version + 8] = '9';
  format::write_file(folder / "other.pt2", other);
  const auto newer = ckpt({"verify", folder / "other.pt2"});
  EXPECT_EQ(newer.exit_code, 3);
  EXPECT_THAT(
      newer.output,
      AllOf(
          HasSubstr("UNSUPPORTED"),
          HasSubstr("models/model.json: schema_version is 9.20")));

  auto broken = bytes;
  broken[broken.find("\"weight_0\"") + 8] = '7';
  format::write_file(folder / "broken.pt2", broken);
  const auto missing = ckpt({"verify", folder / "broken.pt2"});
  EXPECT_EQ(missing.exit_code, 1);
  EXPECT_THAT(
      missing.output,
      HasSubstr("\"data/weights/weight_7\", which is not in the archive"));
}

/// The archives of a live Python.
class PythonExportedTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (const auto python = python_with_torch(); !python.empty()) {
      archives_ = std::make_unique<ScratchFolder>();
      const auto outcome =
          run_python(python, TESSERA_MAKE_ARCHIVES, {archives_->path()});
      EXPECT_EQ(outcome.status, 0) << outcome.output;
    }
  }
  static void TearDownTestSuite() {
    archives_.reset();
  }
  void SetUp() override {
    if (!archives_) {
      GTEST_SKIP() << "this LibTorch came without Python";
    }
  }

  static inline std::unique_ptr<ScratchFolder> archives_;
  ScratchFolder folder_;
};

TEST_F(PythonExportedTest, ConvertsAndComparesLikeAnyCheckpoint) {
  const std::string model = *archives_ / "model.pt2";
  for (const auto* to : {"dcp", "torch", "safetensors"}) {
    const std::string target = folder_ / (std::string("to.") + to);
    const auto converted = ckpt({"convert", model, target, "--to", to});
    ASSERT_EQ(converted.exit_code, 0) << converted.output;
    const auto same = ckpt({"diff", model, target});
    EXPECT_EQ(same.exit_code, 0) << to << ": " << same.output;
    EXPECT_THAT(same.output, HasSubstr("23 the same, 0 different"));
  }
  // Python's tensors, bit by bit: turned, tied, views, of no dimensions.
  const auto expected =
      nlohmann::json::parse(format::read_file(*archives_ / "model.json"));
  const std::string file = format::read_file(folder_ / "to.safetensors");
  const uint64_t begin =
      8 + format::load_le<uint64_t>(format::as_bytes(file), 0);
  const auto header = nlohmann::json::parse(file.substr(8, begin - 8));
  EXPECT_EQ(header["__metadata__"], (nlohmann::json{{"format", "pt"}}));
  size_t num_tensors = 0;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") {
      continue;
    }
    const auto from = begin + tensor["data_offsets"][0].get<uint64_t>();
    const auto to = begin + tensor["data_offsets"][1].get<uint64_t>();
    std::string hex;
    for (uint64_t i = from; i < to; ++i) {
      char digits[3];
      std::snprintf(
          digits, sizeof(digits), "%02x", static_cast<uint8_t>(file[i]));
      hex += digits;
    }
    EXPECT_EQ(hex, expected[name]["bytes"]) << name;
    ++num_tensors;
  }
  EXPECT_EQ(num_tensors, 23);
  // Tied weights stay tied.
  const auto shared = nlohmann::json::parse(
      ckpt({"inspect", folder_ / "to.torch", "--json"}).output);
  std::map<std::string, uint64_t> places;
  for (const auto& tensor : shared["tensors"]) {
    if (!tensor["boxes"].empty()) {
      places[tensor["name"]] = tensor["boxes"][0]["begin"];
    }
  }
  EXPECT_EQ(places.at("embedding.weight"), places.at("head.weight"));
  EXPECT_NE(places.at("left"), places.at("right"));
}

TEST_F(PythonExportedTest, PlanCountsParametersOnceAndBuffersApart) {
  const auto plan = [&](const std::vector<std::string>& words) {
    std::vector<std::string> command{
        tessera::testing::tessera_program(), "plan"};
    command.insert(command.end(), words.begin(), words.end());
    const auto result = tessera::testing::run_command(command);
    EXPECT_EQ(result.exit_code, 0) << result.output;
    return result.output;
  };
  EXPECT_THAT(
      plan({*archives_ / "model.pt2", "--world", "2"}),
      AllOf(
          HasSubstr(": 112 parameters in 12 tensors"),
          HasSubstr("blocks.0 to blocks.1"),
          HasSubstr("10 tensors without gradient"),
          HasSubstr("1 tensor tied to another one: counted once"),
          HasSubstr("saved for backward, and temporaries"),
          HasSubstr("--batch 5: the sample of the export")));
  // The head alone is no second copy of anything.
  EXPECT_THAT(
      plan({*archives_ / "model.pt2", "--select", "head"}),
      HasSubstr(": 28 parameters in 1 tensor"));
  // Its weights are elsewhere, their shapes are known.
  EXPECT_THAT(
      plan({*archives_ / "fake.pt2"}),
      HasSubstr(": 108 parameters in 4 tensors"));
}

TEST_F(PythonExportedTest, WeightsThatAreNotThereAreNotReadAsZeros) {
  const std::string fake = *archives_ / "fake.pt2";
  EXPECT_THAT(
      ckpt({"inspect", fake}).output,
      ContainsRegex("1.weight +float32  \\[4, 8\\]  128 bytes"));
  const auto verified = ckpt({"verify", fake});
  EXPECT_EQ(verified.exit_code, 3);
  EXPECT_THAT(
      verified.output,
      HasSubstr("has no bytes of tensor \"1.weight\"; the model was exported "
                "with fake tensors"));
  const auto converted =
      ckpt({"convert", fake, folder_ / "out", "--to", "safetensors"});
  EXPECT_EQ(converted.exit_code, 2);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
}

} // namespace
} // namespace tessera::checkpoint
