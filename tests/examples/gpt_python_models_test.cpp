// The trainer with models that Python exports here: forms of inputs and
// results, fixed sizes, precisions, token files; and the same steps in Python.
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "checkpoint/disk/python.h"
#include "examples/gpt_fixture.h"
#include "support/command.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

class GptPythonModelsTest : public GptTest {
 protected:
  /// Exports the models, once.
  void SetUp() override {
    if (checkpoint::python_with_torch().empty()) {
      GTEST_SKIP() << "this LibTorch came without Python";
    }
    static const auto exported = checkpoint::run_python(
        checkpoint::python_with_torch(),
        TESSERA_PYTHON_MODELS,
        {"export", models()});
    ASSERT_EQ(exported.status, 0) << exported.output;
  }
  static void TearDownTestSuite() {
    fs::remove_all(models());
  }
  static fs::path models() {
    return fs::path(::testing::TempDir()) /
        ("gpt_python_models_" + std::to_string(::getpid()));
  }
  Words model() override {
    return {"--length", "8", "--lr", "3e-2"};
  }
  Words data() override {
    return tokens_.empty() ? GptTest::data() : tokens_;
  }

  static std::string file(const std::string& name) {
    return (models() / name).string();
  }
  Words with(const std::string& name, Words more = {}) {
    more.insert(more.begin(), {"--model", file(name + ".pt2")});
    return more;
  }
  void refuses(
      const std::string& name,
      const Words& more,
      const std::string& why) {
    const auto result = train_alone("refused", with(name, more));
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_THAT(result.output, HasSubstr(why));
  }
  double first_loss(const std::string& run) {
    return losses(run).at(1);
  }
  void expect_learned(const std::string& run) {
    EXPECT_LT(losses(run).at(12), 0.95 * first_loss(run)) << run;
  }

  Words tokens_; // in place of text
};

TEST_F(GptPythonModelsTest, TheStepsAreThoseOfPython) {
  const std::string llama = TESSERA_EXPORTED_DATA "/tiny_llama_like.pt2";
  tokens_ = {
      "--tokens",
      file("windows.tokens"),
      "--validation-tokens",
      file("windows.tokens")};
  // All windows in each step, so that their order does not matter.
  must_train(
      2,
      "run",
      {"--model",
       llama,
       "--length",
       "16",
       "--lr",
       "3e-3",
       "--micro-batch",
       "2"});
  const auto converted = convert_model(
      folder_ / "run/checkpoints/step_00000012",
      folder_ / "trained.safetensors");
  ASSERT_EQ(converted.exit_code, 0) << converted.output;
  const auto compared = checkpoint::run_python(
      checkpoint::python_with_torch(),
      TESSERA_PYTHON_MODELS,
      {"compare",
       llama,
       file("windows.tokens"),
       folder_ / "run/log.jsonl",
       folder_ / "trained.safetensors"});
  ASSERT_EQ(compared.status, 0) << compared.output;
  const auto differences = json::parse(compared.output);
  EXPECT_EQ(differences.at("steps"), kSteps);
  EXPECT_LT(differences.at("loss"), 1e-5) << compared.output;
  EXPECT_LT(differences.at("parameters"), 1e-4) << compared.output;
}

TEST_F(GptPythonModelsTest, LogitsAreFoundInEveryForm) {
  for (const char* name : {"tuple", "tensor", "mask"}) {
    must_train(2, name, with(name));
    expect_learned(name);
  }
  must_train(2, "first", with("two", {"--model-output", "first"}));
  must_train(2, "second", with("two", {"--model-output", "second"}));
  // Twice the logits of the same model.
  EXPECT_GT(std::abs(first_loss("second") - first_loss("first")), 1e-3);
  refuses(
      "two",
      {},
      "it is not clear which of them are the logits. --model-output names");
}

TEST_F(GptPythonModelsTest, AModelMayHaveALossOfItsOwn) {
  must_train(2, "logits", with("both")); // by the logits
  must_train(2, "own", with("both", {"--model-output", "loss"}));
  EXPECT_NEAR(first_loss("own"), 2 * first_loss("logits"), 1e-4);
  // Labels are the tokens themselves: the model leaves out the last target.
  must_train(2, "labels", with("labels", {"--model-output", "loss"}));
  must_train(2, "by_logits", with("labels"));
  EXPECT_NEAR(first_loss("labels"), first_loss("by_logits"), 0.3);
  EXPECT_NE(first_loss("labels"), first_loss("by_logits"));
  expect_learned("labels");
  // Evaluations can be compared: they take the logits.
  EXPECT_LT(log("own", "eval").at(0).at("loss"), 1.2 * first_loss("logits"));
  refuses(
      "loss",
      {},
      "a loss and no logits, so it cannot write text. Give --sample-tokens 0");
  must_train(2, "loss", with("loss", {"--sample-tokens", "0"}));
  expect_learned("loss");
}

TEST_F(GptPythonModelsTest, FixedSizesAreFilledUpOrRefused) {
  refuses(
      "fixed",
      {"--length", "16"},
      "the model takes windows of 8 tokens, not of 16. Change --length");
  refuses(
      "fixed",
      {"--micro-batch", "2"},
      "the model takes 4 rows at once, not 2. Give --micro-batch 4");
  // 13 windows do not fill the rows of 2 ranks; a sample begins with one token.
  must_train(2, "fixed", with("fixed", {"--eval-windows", "13"}));
  EXPECT_EQ(losses("fixed").size(), kSteps);
  EXPECT_EQ(log("fixed", "sample").size(), 1u);
  const auto alone = train(
      1,
      "fixed",
      with(
          "fixed",
          {"--mode", "eval", "--eval-windows", "13", "--micro-batch", "4"}));
  EXPECT_EQ(alone.exit_code, 0) << alone.output;
  const auto text = alone.output.substr(
      alone.output.find("validation loss ") +
      std::string("validation loss ").size());
  EXPECT_NEAR(
      std::stod(text),
      log("fixed", "eval").back().at("loss").get<double>(),
      1e-4);
}

TEST_F(GptPythonModelsTest, RowsOfAModelsOwnLossAreNotFilledUp) {
  // The last 5 windows of 13 are 3 of one rank and 2 of the other.
  const auto refused = train(
      2,
      "refused",
      with("fixed_loss", {"--sample-tokens", "0", "--eval-windows", "13"}));
  EXPECT_EQ(refused.exit_code, 2) << refused.output;
  EXPECT_THAT(
      refused.output,
      HasSubstr(
          "the model gives its own loss of 4 rows at once, but of 13 evaluated windows a rank would get 2 in the end. Give --eval-windows 8, or another multiple of 8."));
  EXPECT_EQ(log("refused", "step").size(), 0u);
  must_train(
      2,
      "whole",
      with("fixed_loss", {"--sample-tokens", "0", "--eval-windows", "16"}));
  EXPECT_EQ(log("whole", "eval").size(), 2u);
  must_train(
      2,
      "unevaluated",
      with(
          "fixed_loss",
          {"--sample-tokens",
           "0",
           "--eval-windows",
           "13",
           "--eval-every",
           "0"}));
}

TEST_F(GptPythonModelsTest, HalfPrecisionIsTheExports) {
  for (const std::string precision : {"bf16", "fp16"}) {
    refuses(precision, {}, "Give --precision " + precision);
    refuses(
        precision,
        {"--precision", precision, "--strategy", "ddp"},
        "needs --strategy fsdp");
    must_train(2, precision, with(precision, {"--precision", precision}));
    expect_learned(precision);
    must_die_and_resume(
        2,
        2,
        precision + "_resumed",
        with(precision, {"--precision", precision}),
        with(precision, {"--precision", precision}));
    expect_same_bits(precision + "_resumed", precision);
  }
  refuses("double", {}, "the model has parameters of float64");
}

TEST_F(GptPythonModelsTest, WeightsThatTheFileLacksComeFromSafetensors) {
  refuses(
      "empty", {}, "exported without its weights. Give them with --weights");
  for (const char* strategy : {"fsdp", "ddp"}) {
    must_train(
        2,
        strategy,
        with(
            "empty",
            {"--weights",
             file("weights.safetensors"),
             "--strategy",
             strategy}));
    expect_learned(strategy);
  }
  expect_near("fsdp", "ddp");
  // They are not needed again.
  must_train(2, "fsdp", with("empty", {"--steps", "13"}));
}

TEST_F(GptPythonModelsTest, TiedWeightsNeedOneOfTheirNames) {
  must_train(2, "tied", with("tied"));
  for (const char* strategy : {"fsdp", "ddp"}) {
    must_train(
        2,
        strategy,
        with(
            "tied_empty",
            {"--weights", file("tied.safetensors"), "--strategy", strategy}));
    expect_near(strategy, "tied"); // stepped as one
  }
  refuses(
      "tied_empty",
      {"--weights", file("neither.safetensors")},
      "has no \"embed.weight\", nor another name of this tied parameter");
}

TEST_F(GptPythonModelsTest, AFileWithOneModeIsRefusedBeforeItIsNeeded) {
  refuses(
      "frozen_training",
      {},
      "Or train it with --eval-every 0 --sample-tokens 0");
  must_train(
      2,
      "trained",
      with("frozen_training", {"--eval-every", "0", "--sample-tokens", "0"}));
  refuses("frozen_evaluation", {}, "the model is in training mode");
}

TEST_F(GptPythonModelsTest, RefusesInputsAndResultsThatItCannotUse) {
  refuses(
      "unusual",
      {},
      "the model takes \"input_ids\" (int64 [4, 8]), \"temperature\"");
  const auto last = train(2, "refused", with("last"));
  EXPECT_EQ(last.exit_code, 2) << last.output;
  EXPECT_THAT(last.output, HasSubstr("returns logits for every token"));
}

TEST_F(GptPythonModelsTest, APromptMustBeOfTokensThatTheModelKnows) {
  tokens_ = {
      "--tokens",
      file("hundred.tokens"),
      "--tokenizer",
      "byte",
      "--eval-every",
      "0"};
  const Words two_steps{"--steps", "2", "--eval-every", "0"};
  const auto built_in = train(2, "refused", two_steps);
  EXPECT_EQ(built_in.exit_code, 2) << built_in.output;
  EXPECT_THAT(
      built_in.output,
      HasSubstr(
          "--prompt \"#include <\" has the token 105, and the model knows those from 0 to 99."));
  EXPECT_EQ(log("refused", "step").size(), 0u);
  must_train(2, "larger", with("tensor", two_steps)); // knows 256
}

TEST_F(GptPythonModelsTest, TokensAreNumbersWhereThereIsNoTokenizer) {
  tokens_ = {"--tokens", file("windows.tokens")};
  refuses("tensor", {}, "--tokens alone leave nothing to validate with");
  const Words plain{"--eval-every", "0"};
  const auto with_plain = [&](Words more) {
    more.insert(more.begin(), plain.begin(), plain.end());
    return more;
  };
  refuses(
      "tensor",
      with_plain({"--text", "/nowhere"}),
      "--text is about text, which --tokens stands for");
  refuses("tensor", with_plain({"--prompt", "7 plus"}), "\"plus\" is none");
  refuses("tensor", with_plain({"--prompt", "256"}), "\"256\" is none");
  refuses(
      "tensor",
      with_plain({"--tokenizer", "bpe"}),
      "--tokenizer bpe learns from text");
  const Words run = with(
      "tensor",
      with_plain({"--steps", "4", "--sample-tokens", "3", "--prompt", "7 12"}));
  const auto result = train_alone("run", run);
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("129 tokens to learn from, none to"));
  const auto sample = log("run", "sample").at(0).at("text").get<std::string>();
  std::istringstream numbers(sample);
  std::vector<int64_t> found;
  for (int64_t number = 0; numbers >> number;) {
    found.push_back(number);
  }
  EXPECT_EQ(found.size(), 3u) << sample;
  // Data is kept for the life of the run.
  Words changed = run;
  changed.insert(changed.end(), {"--validation-tokens", tokens_[1]});
  const auto refused = train_alone("run", changed);
  EXPECT_EQ(refused.exit_code, 2) << refused.output;
  tokens_.clear();
  refuses(
      "tensor", {"--tokenizer", "none"}, "--tokenizer none is for --tokens");
}

} // namespace
} // namespace tessera
