// The trainer with models that were written in Python: gpt --model.
#include <nlohmann/json.hpp>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "examples/gpt_fixture.h"
#include "support/command.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Has dropout, and takes windows of 2 to 64 tokens.
const char* const kTinyGpt = TESSERA_EXAMPLES "/exported/tiny_gpt.pt2";
/// Has no dropout, so ranks of any number compute the same.
const char* const kTinyLlama = TESSERA_EXPORTED_DATA "/tiny_llama_like.pt2";

class GptExportedTest : public GptTest {
 protected:
  Words model() override {
    Words words{"--model", kTinyGpt};
    words.insert(words.end(), length_.begin(), length_.end());
    return words;
  }

  json settings(const std::string& run) {
    std::ifstream file(folder_ / run / "settings.json");
    return json::parse(file);
  }
  void refuses(
      const std::string& run,
      const Words& flags,
      const std::string& why) {
    const auto result = train_alone(run, flags);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr(why));
  }

  Words length_{"--length", "16"};
};

TEST_F(GptExportedTest, LearnsAndLeavesWhatEveryRunLeaves) {
  const auto result = train(2, "run", {"--steps", "40", "--lr", "5e-3"});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("Gpt (tiny_gpt.pt2) of 0.05 million parameters on cpu"),
          Not(HasSubstr("layers")),
          Not(HasSubstr("mfu"))));
  const auto found = losses("run");
  ASSERT_EQ(found.size(), 40u);
  EXPECT_LT(found.at(40), 0.7 * found.at(1));
  const auto start = log("run", "start").at(0);
  EXPECT_EQ(start.at("units").size(), 3u); // two blocks and the rest
  EXPECT_FALSE(start.at("config").at("model").contains("width"));
  EXPECT_EQ(start.at("config").at("model").at("model"), kTinyGpt);
  EXPECT_EQ(log("run", "sample").size(), 1u);
  EXPECT_EQ(log("run", "eval").size(), 6u);
  EXPECT_TRUE(fs::exists(folder_ / "run" / "report.html"));
  EXPECT_TRUE(fs::exists(folder_ / "run" / "metrics.csv"));
  EXPECT_EQ(settings("run").at("model"), kTinyGpt);
  EXPECT_EQ(settings("run").at("model-digest").get<std::string>().size(), 16u);
}

TEST_F(GptExportedTest, TheLengthIsThatOfTheModelIfNoneIsGiven) {
  length_ = {};
  const auto result = train_alone("run", {"--steps", "1"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("windows of 64 tokens"));
  EXPECT_EQ(settings("run").at("length"), 64);
  EXPECT_EQ(
      log("run", "start").at(0).at("config").at("model").at("length"), 64);
}

TEST_F(GptExportedTest, AFileOfSettingsMayNameTheModel) {
  std::ofstream(folder_ / "settings.toml")
      << "[model]\nmodel = \"" << kTinyGpt << "\"\nlength = 16\n";
  const auto result = run_command(
      {bin_dir() + "/gpt",
       "--config",
       (folder_ / "settings.toml").string(),
       "--text",
       (folder_ / "text").string(),
       "--run",
       (folder_ / "run").string(),
       "--steps",
       "1",
       "--sample-tokens",
       "0",
       "--peak-tflops",
       "0.5"},
      {.environment = without_launcher()});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("Gpt (tiny_gpt.pt2)"),
          HasSubstr("mfu is left out: how much arithmetic"),
          Not(HasSubstr("%")))); // mfu would be one
}

class GptExportedStrategyTest
    : public GptExportedTest,
      public ::testing::WithParamInterface<const char*> {};

TEST_P(GptExportedStrategyTest, ResumesBitByBitOnAsManyRanks) {
  const Words flags{"--strategy", GetParam(), "--micro-batch", "2"};
  must_train(2, "whole", flags);
  must_die_and_resume(2, 2, "resumed", flags, flags);
  expect_same_bits("resumed", "whole");
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    GptExportedStrategyTest,
    ::testing::Values("fsdp", "ddp", "zero"),
    [](const auto& strategy) { return std::string(strategy.param); });

TEST_F(GptExportedTest, ResumesOnOtherRanksUnderAnotherStrategy) {
  const auto with = [](Words more) {
    more.insert(more.end(), {"--model", kTinyLlama});
    return more;
  };
  must_train(2, "whole", with({}));
  must_die_and_resume(2, 4, "on4", with({}), with({}));
  expect_near("on4", "whole");
  must_die_and_resume(4, 1, "on1", with({"--strategy", "ddp"}), with({}));
  expect_near("on1", "whole");
  must_die_and_resume(1, 2, "zero", with({}), with({"--strategy", "zero"}));
  expect_near("zero", "whole");
}

TEST_F(GptExportedTest, RecomputingChangesMemoryAndNoBit) {
  must_train(2, "kept");
  must_train(2, "recomputed", {"--recompute"});
  expect_same_bits("recomputed", "kept");
  const auto activations = [&](const std::string& run) {
    return log(run, "step").at(1).at("memory").at("activations").get<int64_t>();
  };
  EXPECT_LT(activations("recomputed"), 0.9 * activations("kept"));
}

TEST_F(GptExportedTest, EvaluatesAndSamplesWithTheModelOfTheRun) {
  must_train(2, "run", {"--steps", "4"});
  const auto with_run = [&](const Words& more) { // with no other settings
    Words words{bin_dir() + "/gpt", "--run", (folder_ / "run").string()};
    words.insert(words.end(), more.begin(), more.end());
    return run_command(words, {.environment = without_launcher()});
  };
  const auto evaluated = with_run({"--mode", "eval"});
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.output;
  EXPECT_THAT(evaluated.output, HasSubstr("step 4: validation loss"));
  const auto sampled = with_run(
      {"--mode", "sample", "--prompt", "7 plus", "--sample-tokens", "30"});
  EXPECT_EQ(sampled.exit_code, 0) << sampled.output;
  EXPECT_THAT(sampled.output, HasSubstr("| 7 plus"));
}

TEST_F(GptExportedTest, TheWeightsGoBackUnderPythonsNames) {
  must_train(2, "run", {"--steps", "4"});
  const auto converted = convert_model(
      folder_ / "run/checkpoints/step_00000004", folder_ / "model.safetensors");
  ASSERT_EQ(converted.exit_code, 0) << converted.output;
  const auto listed = run_command(
      {tessera_program(),
       "ckpt",
       "inspect",
       (folder_ / "model.safetensors").string()},
      {.environment = without_launcher()});
  for (const char* name :
       {"tokens.weight", "blocks.1.mlp.0.bias", "norm.weight"}) {
    EXPECT_THAT(listed.output, HasSubstr(name));
  }
  // They are also what another run can begin with.
  const Words begin{
      "--weights",
      (folder_ / "model.safetensors").string(),
      "--lr",
      "1e-9",
      "--min-lr",
      "0"};
  const auto result = train(2, "again", begin);
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("began with the weights in"));
  EXPECT_NEAR(
      log("again", "eval").at(0).at("loss").get<double>(),
      [&] {
        const auto eval = train(2, "run", {"--mode", "eval"});
        return std::stod(
            eval.output.substr(eval.output.find("validation loss ") + 16));
      }(),
      1e-4);
}

// ---- What is refused --------------------------------------------------------

TEST_F(GptExportedTest, RefusesFlagsOfTheBuiltInModel) {
  for (const char* flag : {"--layers", "--heads", "--width"}) {
    refuses(
        "run",
        {flag, "2"},
        std::string(flag) + " is for the built-in GPT; --model");
  }
  refuses("run", {"--dropout", "0.1"}, "--dropout is for the built-in GPT");
  refuses("run", {"--chunked-loss"}, "--chunked-loss is for the built-in GPT");
}

TEST_F(GptExportedTest, RefusesSizesThatTheModelWasNotExportedFor) {
  refuses(
      "run",
      {"--length", "65"},
      "the model takes windows of 2 to 64 tokens, not of 65. Change --length");
  const auto result = train(2, "run", {"--batch", "4096"});
  EXPECT_EQ(result.exit_code, 2) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("the model takes 1 to 1024 rows at once, not 2048. Give "
                    "--micro-batch 1024 and a --batch that is a multiple of "
                    "2048"),
          Not(HasSubstr("[1] gpt:")))); // only rank 0 prints it
}

TEST_F(GptExportedTest, RefusesMoreTokensThanTheModelKnows) {
  refuses(
      "run",
      {"--tokenizer", "bpe", "--vocabulary", "300"},
      "the model knows 256 tokens, but the data has 300");
}

TEST_F(GptExportedTest, RefusesAnotherPrecisionThanTheExports) {
  for (const char* precision : {"bf16", "fp16"}) {
    refuses(
        "run",
        {"--precision", precision},
        "the model was exported in float32, and computes in that, not in "
        "--precision " +
            std::string(precision) + ". Give --precision fp32");
  }
}

TEST_F(GptExportedTest, RefusesWhatTheModelDoesNotReturn) {
  refuses(
      "run",
      {"--model-output", "scores"},
      "the model returns \"logits\" (float32 [1 to 1024, 2 to 64, 256]), and "
      "\"scores\" is none of them that fits");
}

TEST_F(GptExportedTest, RefusesAFileThatIsNotThereOrNoModel) {
  refuses("run", {"--model", "/nowhere.pt2"}, "\"/nowhere.pt2\" is not a file");
  const auto text = (folder_ / "text/numbers.txt").string();
  const auto result = train(2, "run", {"--model", text});
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("numbers.txt"));
  EXPECT_FALSE(fs::exists(folder_ / "run" / "settings.json"));
}

TEST_F(GptExportedTest, ARunStaysWithItsModel) {
  must_train(2, "run", {"--steps", "4"});
  refuses(
      "run",
      {"--model", kTinyLlama},
      "was begun with another model than --model");
  // The same bytes at another place are the same model.
  const auto moved = (folder_ / "moved.pt2").string();
  fs::copy_file(kTinyGpt, moved);
  must_train(2, "run", {"--model", moved, "--steps", "5"});
  // A byte of the weights that is another one.
  std::fstream file(moved, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-static_cast<std::streamoff>(fs::file_size(moved) / 2), file.end);
  file.put('?');
  file.close();
  refuses("run", {"--model", moved}, "its digest was");
}

class GptBuiltInTest : public GptTest {};

TEST_F(GptBuiltInTest, ARunOfTheBuiltInModelTakesNoOther) {
  must_train(1, "run", {"--steps", "4"});
  const auto result = run_command(
      {bin_dir() + "/gpt",
       "--run",
       (folder_ / "run").string(),
       "--model",
       kTinyGpt},
      {.environment = without_launcher()});
  EXPECT_EQ(result.exit_code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("trains the built-in GPT, not --model"));
  const auto without = train_alone("other", {"--model-output", "logits"});
  EXPECT_EQ(without.exit_code, 2) << without.output;
  EXPECT_THAT(without.output, HasSubstr("--model-output is for --model"));
}

} // namespace
} // namespace tessera
