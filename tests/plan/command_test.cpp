// `tessera plan`, as users run it.
#include "support/command.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>

#include "checkpoint/store/scratch_folder.h"

namespace tessera::plan {
namespace {

using checkpoint::ScratchFolder;
using nlohmann::json;
using tessera::testing::CommandResult;
using ::testing::AllOf;
using ::testing::HasSubstr;

CommandResult run(const std::vector<std::string>& words) {
  std::vector<std::string> command{tessera::testing::tessera_program(), "plan"};
  command.insert(command.end(), words.begin(), words.end());
  return tessera::testing::run_command(command);
}

json run_json(std::vector<std::string> words) {
  words.emplace_back("--json");
  const CommandResult result = run(words);
  EXPECT_LE(result.exit_code, 1) << result.output;
  return json::parse(result.output);
}

/// A safetensors file with these tensors, all zeros.
void write_safetensors(
    const std::filesystem::path& path,
    const std::vector<
        std::tuple<std::string, std::string, std::vector<int64_t>>>& tensors) {
  json header;
  int64_t end = 0;
  for (const auto& [name, dtype, shape] : tensors) {
    int64_t bytes = dtype == "F32" ? 4 : dtype == "I64" ? 8 : 2;
    for (const int64_t size : shape) {
      bytes *= size;
    }
    header[name] = {
        {"dtype", dtype},
        {"shape", shape},
        {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof(length));
  file << text << std::string(static_cast<size_t>(end), '\0');
}

TEST(PlanCommandTest, PrintsTablesAndWhatWasAssumed) {
  const auto result = run({"--layers", "12", "--width", "768", "--world", "8"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("124.44 M parameters in 148 tensors"),
          HasSubstr("full_shard on 8 rank(s)"),
          HasSubstr("all-gather, forward                 13"),
          HasSubstr("blocks.0 to blocks.11"),
          HasSubstr("--heads 12"),
          HasSubstr("--tied: the embedding is the output layer too")));
  const auto as_the_trainer_says = run(
      {"--layers",
       "12",
       "--width",
       "768",
       "--world",
       "8",
       "--strategy",
       "fsdp"});
  EXPECT_EQ(as_the_trainer_says.output, result.output);
}

TEST(PlanCommandTest, ATrillionParametersFitOnSixteenThousandRanks) {
  const auto plan = run_json(
      {"--layers",
       "128",
       "--width",
       "25600",
       "--heads",
       "200",
       "--param-dtype",
       "bf16",
       "--device",
       "cuda",
       "--mesh",
       "8x2048",
       "--memory",
       "1TB",
       "--length",
       "2048",
       "--recompute"});
  EXPECT_EQ(plan["setup"]["world"], 16384);
  EXPECT_EQ(plan["setup"]["strategy"], "hybrid");
  EXPECT_GT(plan["model"]["parameters"], int64_t{1'000'000'000'000});
  EXPECT_EQ(plan["fit"]["fits"], true);
  EXPECT_GE(plan["fit"]["largest"], 1);
  EXPECT_EQ(plan["wire"]["all_reduce"]["collectives"], 129);
  EXPECT_EQ(plan["units"][0]["count"], 128);
}

TEST(PlanCommandTest, ExitCodeSaysThatItDoesNotFit) {
  const auto result = run(
      {"--layers",
       "12",
       "--width",
       "768",
       "--memory",
       "1MB",
       "--largest",
       "layers"});
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("DOES NOT FIT"),
          HasSubstr("largest layers that fits: none, not even 1"),
          HasSubstr("smallest number of ranks: no number is enough")));
}

TEST(PlanCommandTest, GroupsACheckpointIntoUnits) {
  const ScratchFolder folder;
  std::vector<std::tuple<std::string, std::string, std::vector<int64_t>>>
      tensors{
          {"tokens.weight", "F32", {16, 8}},
          {"steps", "I64", {3}},
          {"odd.weight", "BF16", {5}}};
  for (int i = 0; i < 12; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    tensors.emplace_back(
        block + ".experts.0.weight", "F32", std::vector<int64_t>{8, 8});
    tensors.emplace_back(block + ".bias", "F32", std::vector<int64_t>{8});
  }
  write_safetensors(folder / "model.safetensors", tensors);
  const auto plan = run_json({folder / "model.safetensors", "--world", "2"});
  EXPECT_EQ(plan["knows_activations"], false);
  EXPECT_EQ(plan["model"]["tensors"], 26);
  ASSERT_EQ(plan["units"].size(), 2);
  EXPECT_EQ(plan["units"][0]["count"], 12);
  EXPECT_EQ(plan["units"][0]["last"], "blocks.11"); // not blocks.9
  EXPECT_EQ(plan["units"][0]["parameters"], 72);
  EXPECT_EQ(plan["units"][1]["parameters"], 16 * 8 + 5);
  EXPECT_EQ(plan["at_rest"]["activations"], 0);
  // Two bundles: float32, and bfloat16 with its padding to 16 elements.
  EXPECT_EQ(plan["units"][1]["shard_bytes"], 64 * 4 + 16 * 2);

  const auto experts = run_json(
      {folder / "model.safetensors",
       "--unit",
       R"(blocks\.\d+\.experts\.\d+)",
       "--activations",
       "1MB"});
  EXPECT_EQ(experts["units"][0]["first"], "blocks.0.experts.0");
  EXPECT_EQ(experts["units"].back()["parameters"], 16 * 8 + 5 + 12 * 8);
  EXPECT_EQ(experts["device_memory"]["highest"]["activations"], 1'000'000);

  const auto one = run_json({folder / "model.safetensors", "--select", "odd"});
  EXPECT_EQ(one["model"]["parameters"], 5);
}

TEST(PlanCommandTest, ReadsFoldersOfEachFormat) {
  const std::string goldens = TESSERA_FORMAT_GOLDENS;
  const auto dcp = run_json({goldens + "/plain"});
  EXPECT_EQ(dcp["model"]["parameters"], 8); // w and b, no optimizer state
  EXPECT_THAT(dcp["notes"].dump(), HasSubstr("left out: not below"));
  const auto index = run_json({goldens + "/model.safetensors.index.json"});
  EXPECT_GT(index["model"]["parameters"], 0);
}

TEST(PlanCommandTest, TheHeadBesideAModelBelongsToIt) {
  const ScratchFolder folder;
  write_safetensors(
      folder / "m.safetensors",
      {{"model.layers.0.w", "F32", {2}}, {"lm_head.weight", "F32", {3}}});
  const auto plan = run_json({folder / "m.safetensors"});
  EXPECT_EQ(plan["model"]["parameters"], 5);
  EXPECT_EQ(plan["units"][0]["first"], "model.layers.0");
}

TEST(PlanCommandTest, NamesFromFilesCannotWriteToTheTerminal) {
  const ScratchFolder folder;
  write_safetensors(folder / "m.safetensors", {{"a\x1b[2Jb.0.w", "F32", {2}}});
  const auto result = run({folder / "m.safetensors"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, ::testing::Not(HasSubstr("\x1b")));
}

TEST(PlanCommandTest, RejectsWithReasons) {
  const ScratchFolder folder;
  std::ofstream(folder / "bad.safetensors") << "not a checkpoint";
  const std::string bad = folder / "bad.safetensors";
  const struct {
    std::vector<std::string> words;
    std::string reason;
  } cases[]{
      {{}, "give a checkpoint, or --layers and --width"},
      {{bad}, "bad.safetensors"},
      {{folder / "nothing"}, "nothing"},
      {{bad, "--batch", "4"}, "do not go with it"},
      {{"--layers", "2", "--width", "100"}, "Give --heads"},
      {{"--layers", "2", "--width", "128", "--strategy", "hybrid"},
       "needs --mesh"},
      {{"--layers", "2", "--width", "128", "--mesh", "2by4"}, "such as 8x2048"},
      {{"--layers", "2", "--width", "128", "--mesh", "2x4", "--world", "8"},
       "Give one of them"},
      {{"--layers", "2", "--width", "128", "--strategy", "ddp", "--offload"},
       "belongs to sharding"},
      {{"--layers", "2", "--width", "128", "--no-sync"}, "--accumulate"},
      {{"--layers", "2", "--width", "128", "--largest", "layers"}, "--memory"},
      {{"--layers", "2", "--width", "128", "--memory", "many"}, "many"},
      {{"--layers", "2", "--width", "128", "--strategy", "tensor"},
       "shard_grad_op"},
      {{"--layers", "99999999", "--width", "128"}, "expected 1 to 10000"},
      {{"--layers", "2", "--width", "68719476736"}, "64-bit"},
  };
  for (const auto& one : cases) {
    const auto result = run(one.words);
    EXPECT_EQ(result.exit_code, 2) << one.reason;
    EXPECT_THAT(result.output, HasSubstr(one.reason));
  }
}

TEST(PlanCommandTest, RejectsAPatternThatIsNone) {
  const ScratchFolder folder;
  write_safetensors(folder / "m.safetensors", {{"w", "F32", {2}}});
  const auto result = run({folder / "m.safetensors", "--unit", "(["});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("is no regular expression"));
}

} // namespace
} // namespace tessera::plan
