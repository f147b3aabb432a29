// The examples that are one file each: they judge themselves, by exit code.
#include <filesystem>
#include <fstream>

#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

/// With 0 ranks: the program alone, without a launcher.
CommandResult run_example(
    const std::string& name,
    int num_ranks,
    const std::vector<std::string>& arguments = {}) {
  std::vector<std::string> words;
  if (num_ranks > 0) {
    words = {tessera_program(), "run", "-n", std::to_string(num_ranks)};
  }
  words.push_back(bin_dir() + "/" + name);
  words.insert(words.end(), arguments.begin(), arguments.end());
  auto environment = without_launcher();
  environment["OMP_NUM_THREADS"] = "1"; // threads that spin hate company
  return run_command(
      words, {.environment = environment, .timeout = std::chrono::minutes(10)});
}

/// A folder that is removed with the test.
struct Scratch {
  Scratch() {
    std::string pattern = fs::temp_directory_path() / "examples_testXXXXXX";
    path = mkdtemp(pattern.data());
  }
  ~Scratch() {
    fs::remove_all(path);
  }
  std::string path;
};

/// The number after `text` in the output; -1 if there is no such text.
double number_after(const std::string& output, const std::string& text) {
  const auto at = output.find(text);
  return at == std::string::npos ? -1
                                 : std::stod(output.substr(at + text.size()));
}

TEST(ResNetExampleTest, TwoRanksLearnToTellShapesApart) {
  const auto result = run_example("resnet_ddp", 2);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output, AllOf(HasSubstr("2 rank(s)"), HasSubstr("ok: it tells")));
}

TEST(ResNetExampleTest, LearnsAloneToo) {
  const auto result = run_example("resnet_ddp", 0);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("1 rank(s)"));
}

TEST(ZeroSgdExampleTest, EachOfTwoRanksKeepsAPartAndRankZeroSavesAll) {
  const Scratch scratch;
  const auto result = run_example("zero_sgd", 2, {scratch.path});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, AllOf(HasSubstr("saved to"), HasSubstr("ok: ")));
  EXPECT_TRUE(fs::exists(scratch.path + "/optimizer/.metadata"));
  const double whole = number_after(result.output, "continues with ");
  for (const char* rank : {"rank 0 of 2 keeps ", "rank 1 of 2 keeps "}) {
    EXPECT_NEAR(number_after(result.output, rank), whole / 2, whole / 10)
        << result.output;
  }
}

TEST(ZeroSgdExampleTest, AloneItKeepsAllAndNeedsNoFolder) {
  const auto result = run_example("zero_sgd", 0);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(HasSubstr("rank 0 of 1 keeps"), Not(HasSubstr("saved to"))));
}

/// Opens a folder with Python, and with its safetensors package if it is there.
CommandResult open_in_python(const std::string& folder) {
  std::string python;
  std::getline(std::ifstream(TESSERA_PYTHON_FILE), python);
  return run_command(
      {python.empty() ? "python3" : python,
       TESSERA_EXAMPLES_TESTS "/open_safetensors.py",
       folder});
}

TEST(HfSafetensorsExampleTest, TwoRanksLoadTrainAndWriteWhatPythonOpens) {
  const Scratch scratch;
  const auto result = run_example("hf_safetensors", 2, {scratch.path});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("ok: logits of the sharded model and of pretrained"),
          HasSubstr("ok: 20 steps"),
          HasSubstr("ok: logits of the sharded model and of finetuned"),
          Not(HasSubstr("WRONG"))));
  // No rank has or reads more than its part.
  EXPECT_NEAR(number_after(result.output, "has about "), 3.17 / 2, 0.1);
  EXPECT_NEAR(number_after(result.output, "and read "), 1.58 / 2, 0.1);
  for (const char* folder : {"/pretrained", "/finetuned"}) {
    const auto opened = open_in_python(scratch.path + folder);
    EXPECT_EQ(opened.exit_code, 0) << opened.output;
  }
}

TEST(HfSafetensorsExampleTest, AloneItTakesAFolderThatIsThereIfItIsWhole) {
  const Scratch scratch;
  ASSERT_EQ(run_example("hf_safetensors", 0, {scratch.path}).exit_code, 0);
  const auto pretrained = fs::path(scratch.path) / "pretrained";
  const auto before = fs::last_write_time(pretrained);
  const auto again = run_example("hf_safetensors", 0, {scratch.path});
  EXPECT_EQ(again.exit_code, 0) << again.output;
  EXPECT_EQ(fs::last_write_time(pretrained), before);

  fs::remove(pretrained / "model-00002-of-00004.safetensors");
  const auto result = run_example("hf_safetensors", 2, {scratch.path});
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_THAT(result.output, HasSubstr("model-00002-of-00004.safetensors"));
}

TEST(HfSafetensorsExampleTest, RejectsACallWithoutAFolder) {
  const auto result = run_example("hf_safetensors", 0);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("usage:"));
}

} // namespace
} // namespace tessera
