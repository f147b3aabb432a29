// `tessera plan`, as users run it.
#include "support/command.h"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>

#include "checkpoint/disk/scratch_folder.h"

namespace tessera::plan {
namespace {

using checkpoint::ScratchFolder;
using nlohmann::json;
using tessera::testing::CommandResult;
using tessera::testing::run_command;
using tessera::testing::tessera_program;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CommandResult run(const std::vector<std::string>& words) {
  std::vector<std::string> command{tessera_program(), "plan"};
  command.insert(command.end(), words.begin(), words.end());
  return run_command(command);
}

json run_json(std::vector<std::string> words) {
  words.emplace_back("--json");
  const CommandResult result = run(words);
  EXPECT_LE(result.exit_code, 1) << result.output;
  return json::parse(result.output);
}

/// Name, dtype, shape.
using StoredShape = std::tuple<std::string, std::string, std::vector<int64_t>>;

/// A safetensors file with these tensors, all zeros.
void write_safetensors(
    const std::filesystem::path& path,
    const std::vector<StoredShape>& tensors) {
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
  file << text;
  file.close();
  std::filesystem::resize_file( // zeros that take no room
      path,
      sizeof(length) + length + static_cast<uint64_t>(end));
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
          HasSubstr("--tied: the embedding is also the output layer")));
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

/// Each suggestion is what the same command says with the suggested flags.
TEST(PlanCommandTest, SaysWhatWouldMakeItFit) {
  const std::vector<std::string> asked{
      "--layers",
      "12",
      "--width",
      "768",
      "--batch",
      "8",
      "--world",
      "2",
      "--device",
      "cuda",
      "--memory",
      "3GB"};
  const json plan = run_json(asked);
  ASSERT_FALSE(plan["fit"]["fits"].get<bool>());
  const json& suggestions = plan["fit"]["suggestions"];
  ASSERT_GE(suggestions.size(), 3U);
  bool any_fits = false;
  for (const json& suggestion : suggestions) {
    auto words = asked;
    std::istringstream flags(suggestion["flags"].get<std::string>());
    for (std::string word; flags >> word;) {
      const auto given = std::find(words.begin(), words.end(), word);
      if (given == words.end()) {
        words.push_back(word);
      } else { // a flag that is given already gets another value
        std::string value;
        flags >> value;
        *std::next(given) = value;
      }
    }
    const json other = run_json(words);
    EXPECT_EQ(
        other["device_memory"]["at_peak"]["total"], suggestion["peak_bytes"])
        << suggestion;
    EXPECT_EQ(other["fit"]["fits"], suggestion["fits"]) << suggestion;
    EXPECT_LT(
        suggestion["peak_bytes"], plan["device_memory"]["at_peak"]["total"]);
    any_fits = any_fits || suggestion["fits"].get<bool>();
  }
  EXPECT_TRUE(any_fits) << suggestions;
  EXPECT_THAT(run(asked).output, HasSubstr("what would help"));
}

TEST(PlanCommandTest, PredictsTheTimeOfAStep) {
  const std::vector<std::string> words{
      "--layers", "2", "--width", "128", "--world", "8", "--tflops", "100"};
  auto with_wire = words;
  with_wire.insert(with_wire.end(), {"--bandwidth", "50GB", "--latency", "20"});
  EXPECT_THAT(
      run(with_wire).output,
      AllOf(
          HasSubstr("time per step"),
          HasSubstr("while computing"),
          HasSubstr("no optimizer")));
  const json seconds = run_json(with_wire)["seconds"];
  EXPECT_GT(seconds["computing"], 0);
  EXPECT_GT(seconds["sending"], 7 * 20e-6); // at least the latencies
  EXPECT_NEAR(
      seconds["step"].get<double>(),
      seconds["computing"].get<double>() + seconds["waiting"].get<double>(),
      1e-12);
  EXPECT_FALSE(
      run_json({"--layers", "2", "--width", "128"}).contains("seconds"));

  const ScratchFolder folder;
  const std::string path = folder / "m.safetensors";
  write_safetensors(path, {{"blocks.0.weight", "F32", {100, 100}}});
  const json of_file =
      run_json({path, "--tflops", "1e-6", "--tokens", "10"})["seconds"];
  EXPECT_NEAR(of_file["computing"].get<double>(), 6 * 1e4 * 10 / 1e6, 1e-9);
  EXPECT_THAT(run({path, "--tflops", "1"}).output, HasSubstr("--tokens N"));
}

TEST(PlanCommandTest, SuggestsNothingToARunThatFits) {
  const json plan =
      run_json({"--layers", "2", "--width", "64", "--memory", "80GB"});
  EXPECT_TRUE(plan["fit"]["suggestions"].empty());
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
          HasSubstr("unit: parameters that are gathered together"),
          HasSubstr("1 GB is 10^9 bytes"),
          HasSubstr("largest layers that fits: none, not even 1"),
          HasSubstr("smallest number of ranks: no number is enough")));
}

TEST(PlanCommandTest, GroupsACheckpointIntoUnits) {
  const ScratchFolder folder;
  std::vector<std::tuple<std::string, std::string, std::vector<int64_t>>>
      tensors{
          {"tokens.weight", "F32", {16, 8}},
          {"steps", "I64", {3}},
          {"norm.running_mean", "F32", {8}},
          {"norm.running_var", "F32", {8}},
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
  for (const char* text : {"\u009b31m", "\u202e", "\u2066", "\x7f"}) {
    write_safetensors(
        folder / "m.safetensors",
        {{std::string("a") + text + ".0.w", "F32", {2}}});
    EXPECT_THAT(
        run({folder / "m.safetensors"}).output,
        ::testing::Not(HasSubstr(text)));
  }
  write_safetensors(folder / "m.safetensors", {{"\u00e4.0.w", "F32", {2}}});
  EXPECT_THAT(run({folder / "m.safetensors"}).output, HasSubstr("\u00e4"));
}

TEST(PlanCommandTest, LinesOfUnitsAreOfOneList) {
  const ScratchFolder folder;
  const std::string file = folder / "m.safetensors";
  write_safetensors(
      file,
      {{"blocks.0.w", "F32", {4, 4}},
       {"blocks.1.w", "F32", {4, 4}},
       {"heads.0.w", "F32", {4, 4}},
       {"w", "F32", {4, 4}}});
  const auto units = run_json({file})["units"];
  ASSERT_EQ(units.size(), 3U);
  EXPECT_EQ(units[0]["last"], "blocks.1");
  EXPECT_EQ(units[2]["first"], "root");
  // Whole copies have no padding.
  write_safetensors(file, {{"a", "F32", {3}}, {"b", "F32", {5}}});
  EXPECT_EQ(
      run_json({file, "--strategy", "ddp"})["units"][0]["shard_bytes"], 32);
  write_safetensors(file, {{"h.w", "F32", {10}}, {"h0.w", "F32", {20}}});
  EXPECT_EQ(run_json({file, "--unit", "h[0-9]*"})["units"].size(), 3U);
}

TEST(PlanCommandTest, TheFewestRanksAreOfTheStrategy) {
  const auto fewest = [](const std::vector<std::string>& more) {
    std::vector<std::string> words{
        "--layers", "12", "--width", "768", "--device", "cuda"};
    words.insert(words.end(), more.begin(), more.end());
    return run_json(words)["fit"]["smallest_world"];
  };
  EXPECT_EQ(
      fewest({"--strategy", "no_shard", "--world", "1", "--memory", "2.5GB"}),
      nullptr);
  EXPECT_EQ(fewest({"--mesh", "8x1", "--memory", "2.5GB"}), 16);
  EXPECT_EQ(fewest({"--mesh", "8x1", "--memory", "30GB"}), 8);
  // More ranks may need more memory where shards are whole rows.
  const ScratchFolder folder;
  std::vector<StoredShape> tensors;
  for (int i = 0; i < 6; ++i) {
    tensors.push_back(
        {"blocks." + std::to_string(i) + ".w", "F32", {9, 1000000}});
  }
  write_safetensors(folder / "m.safetensors", tensors);
  EXPECT_EQ(
      run_json(
          {folder / "m.safetensors",
           "--layout",
           "dim0",
           "--world",
           "16",
           "--device",
           "cuda",
           "--overlap-bytes",
           "0",
           "--memory",
           "240MB"})["fit"]["smallest_world"],
      9);
}

TEST(PlanCommandTest, AFullDiskIsAnError) {
  const auto result = run_command(
      {"/bin/sh",
       "-c",
       tessera_program() + " plan --layers 2 --width 128 >/dev/full"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("standard output"));
}

/// As with the trainer's flag of this name.
TEST(PlanCommandTest, ALossInChunksNeedsLessMemory) {
  std::vector<std::string> words{
      "--layers", "12", "--width", "768", "--batch", "8", "--device", "cuda"};
  const json whole = run_json(words);
  words.emplace_back("--chunked-loss");
  const json chunked = run_json(words);
  const auto peak = [](const json& plan) {
    return plan["device_memory"]["at_peak"]["total"].get<int64_t>();
  };
  const int64_t logits = int64_t{8} * 1024 * 50257 * 4;
  EXPECT_LT(peak(chunked), peak(whole) - 2 * logits);
  EXPECT_THAT(run(words).output, Not(HasSubstr("--loss-dtype")));
}

TEST(PlanCommandTest, RejectsWithReasons) {
  const ScratchFolder folder;
  std::ofstream(folder / "bad.safetensors") << "not a checkpoint";
  const std::string bad = folder / "bad.safetensors";
  const std::string good = folder / "good.safetensors";
  write_safetensors(good, {{"weight", "F32", {4, 4}}});
  const struct {
    std::vector<std::string> words;
    std::string reason;
  } cases[]{
      {{}, "give a checkpoint, or --layers and --width"},
      {{bad}, "bad.safetensors"},
      {{folder / "nothing"}, "nothing"},
      {{bad, "--batch", "4"}, "bad.safetensors"},
      {{good, "--batch", "4"}, "leave out the flags of a GPT"},
      {{bad, "--chunked-loss"}, "leave out the flags of a GPT"},
      {{"--layers",
        "2",
        "--width",
        "128",
        "--chunked-loss",
        "--loss-dtype",
        "float32"},
       "Leave out one of them"},
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
      {{"--layers", "2", "--width", "128", "--tflops", "0"}, "positive"},
      {{"--layers", "2", "--width", "128", "--tflops", "1e300"}, "positive"},
      {{"--layers", "2", "--width", "128", "--tflops", "1", "--latency", "inf"},
       "0 or more"},
      {{"--layers",
        "2",
        "--width",
        "128",
        "--tflops",
        "1",
        "--bandwidth",
        "0.5"},
       "1 or more"},
      {{"--layers", "2", "--width", "128", "--bandwidth", "1GB"}, "--tflops"},
      {{"--layers", "2", "--width", "128", "-n", "2", "--tflops", "1"},
       "--bandwidth"},
      {{"--layers", "2", "--width", "128", "--tflops", "1", "--tokens", "5"},
       "--tokens belongs"},
      {{"--layers", "2", "--width", "128", "--strategy", "tensor"},
       "shard_grad_op"},
      {{"--layers",
        "2",
        "--width",
        "128",
        "--strategy",
        "ddp",
        "--layout",
        "flat"},
       "--layout and --reshard"},
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
  EXPECT_THAT(result.output, HasSubstr("is not a regular expression"));
}

} // namespace
} // namespace tessera::plan
