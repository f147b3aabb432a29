// What the trainer leaves for people and for other programs: curves, the best
// checkpoint, what it says at the start and at the end.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "best.h"
#include "examples/gpt_fixture.h"
#include "flops.h"
#include "learning_rate.h"
#include "settings.h"
#include "support/command.h"
#include "train/tensorboard.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class GptOutputsTest : public GptTest {
 protected:
  /// RUN/metrics.csv by column; an empty field is nothing.
  using Table = std::map<std::string, std::vector<std::optional<double>>>;
  Table table(const std::string& run) {
    std::ifstream file(folder_ / run / "metrics.csv");
    std::string line;
    std::getline(file, line);
    const auto names = fields(line);
    Table table;
    while (std::getline(file, line)) {
      const auto values = fields(line);
      EXPECT_EQ(values.size(), names.size()) << line;
      for (size_t i = 0; i < names.size(); ++i) {
        table[names[i]].push_back(
            values.at(i).empty() ? std::nullopt
                                 : std::optional(std::stod(values.at(i))));
      }
    }
    return table;
  }
  static std::vector<std::string> fields(const std::string& line) {
    std::vector<std::string> found;
    std::string rest = line + ",";
    for (size_t end = rest.find(','); end != std::string::npos;
         rest = rest.substr(end + 1), end = rest.find(',')) {
      found.push_back(rest.substr(0, end));
    }
    return found;
  }
  /// Every step once, in order, with the losses of the log.
  void expect_all_steps(const Table& table, const std::string& run) {
    const auto expected = losses(run);
    ASSERT_EQ(table.at("step").size(), kSteps);
    for (size_t i = 0; i < kSteps; ++i) {
      const auto step = static_cast<int64_t>(i) + 1;
      EXPECT_EQ(table.at("step")[i], static_cast<double>(step));
      EXPECT_EQ(table.at("loss")[i], expected.at(step)); // bit by bit
    }
  }

  struct Streams {
    int exit_code = -1;
    std::string out;
    std::string err;
  };
  /// Runs `words` with its streams apart.
  Streams run_apart(const Words& words) {
    const auto out = (folder_ / "out.txt").string();
    const auto err = (folder_ / "err.txt").string();
    Words shell{
        "/bin/sh", "-c", "exec \"$@\" >'" + out + "' 2>'" + err + "'", "sh"};
    shell.insert(shell.end(), words.begin(), words.end());
    Streams streams;
    streams.exit_code =
        run_command(shell, {.environment = without_launcher()}).exit_code;
    const auto read = [](const std::string& path) {
      std::ifstream file(path);
      std::stringstream text;
      text << file.rdbuf();
      return text.str();
    };
    streams.out = read(out);
    streams.err = read(err);
    return streams;
  }
  /// The trainer alone, without `tessera run`.
  Words alone(const std::string& run, const Words& flags) {
    const auto all = words(1, run, flags);
    return {all.begin() + 6, all.end()};
  }
};

TEST_F(GptOutputsTest, TheTableAndTensorBoardHaveEveryStepOnce) {
  must_die_and_resume(
      2, 2, "run", {}, {"--peak-tflops", "0.01"}); // steps 5 to 7 twice
  const auto found = table("run");
  expect_all_steps(found, "run");
  for (const char* name :
       {"lr", "grad_norm", "seconds", "tokens_per_second", "memory_bytes"}) {
    for (const auto& value : found.at(name)) {
      EXPECT_GT(value.value(), 0) << name;
    }
  }
  const auto evals = log("run", "eval");
  for (size_t i = 0; i < kSteps; ++i) {
    EXPECT_EQ(found.at("validation_loss")[i].has_value(), i == 5 || i == 11);
    EXPECT_EQ(found.at("mfu")[i].has_value(), i >= 4) << i;
  }
  EXPECT_EQ(
      found.at("validation_loss")[11], evals.back().at("loss").get<double>());

  TESSERA_NEEDS_TENSORBOARD();
  const auto curves =
      read_with_tensorboard(folder_ / "run" / "tensorboard").at("curves");
  const std::map<std::string, std::string> columns{
      {"train/loss", "loss"},
      {"train/lr", "lr"},
      {"train/grad_norm", "grad_norm"},
      {"speed/tokens_per_second", "tokens_per_second"},
      {"speed/mfu", "mfu"},
      {"memory/bytes", "memory_bytes"},
      {"validation/loss", "validation_loss"}};
  EXPECT_EQ(curves.size(), columns.size());
  for (const auto& [tag, column] : columns) {
    json expected = json::array();
    for (size_t i = 0; i < kSteps; ++i) {
      if (const auto value = found.at(column)[i]) {
        expected.push_back(json::array(
            {i + 1, static_cast<double>(static_cast<float>(*value))}));
      }
    }
    EXPECT_EQ(curves.at(tag), expected) << tag;
  }
}

TEST_F(GptOutputsTest, MfuIsTheShareOfThePeakThatWasGiven) {
  must_train(2, "run", {"--peak-tflops", "0.25"});
  // 2 ranks; bytes, width 32, 2 blocks, length 16.
  const gpt::GptConfig config{.length = 16, .layers = 2, .width = 32};
  const int64_t parameters =
      256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32;
  for (const auto& entry : log("run", "step")) {
    const double tokens_per_second = 8 * 16 / entry.at("seconds").get<double>();
    EXPECT_NEAR(
        entry.at("mfu").get<double>(),
        tokens_per_second * gpt::flops_per_token(config, parameters) /
            (2 * 0.25e12),
        1e-9);
  }
  must_train(2, "unknown");
  EXPECT_FALSE(log("unknown", "step").at(0).contains("mfu"));
}

TEST_F(GptOutputsTest, TheStartTellsTheSettingsAndTheLineTheGradients) {
  const auto result =
      train(2, "run", {"--peak-tflops", "0.25", "--prompt", "two words"});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          ContainsRegex("  layers +2 +default 4\n"),
          ContainsRegex("  prompt +\"two words\" +default \"#include <\"\n"),
          ContainsRegex("  strategy +fsdp\n"), // important
          Not(HasSubstr("  weight-decay"))));
  // Columns are aligned.
  std::set<size_t> places;
  std::istringstream lines(result.output);
  for (std::string line; std::getline(lines, line);) {
    if (const auto at = line.find("  default "); at != std::string::npos) {
      places.insert(at);
    }
  }
  EXPECT_EQ(places.size(), 1);
  EXPECT_EQ(num_times(result.output, "settings:"), 1); // of one rank
  EXPECT_THAT(
      result.output, ContainsRegex("step 12/12 .*grad [0-9.]+ .*mfu [0-9.]+%"));
}

TEST_F(GptOutputsTest, TheBestCheckpointStaysAndIsUsed) {
  // A learning rate that ruins the model as it rises.
  const Words flags{
      "--keep-best",
      "--keep",
      "1",
      "--eval-every",
      "2",
      "--checkpoint-every",
      "4",
      "--lr",
      "1",
      "--min-lr",
      "1",
      "--warmup",
      "12",
      "--clip",
      "1000"};
  must_train(2, "run", flags);
  const auto lowest_in_log = [&] {
    std::pair<double, int64_t> lowest{HUGE_VAL, 0};
    for (const auto& entry : log("run", "eval")) {
      lowest = std::min(
          lowest,
          {entry.at("loss").get<double>(), entry.at("step").get<int64_t>()});
    }
    return lowest;
  };
  const auto [lowest, best] = lowest_in_log();
  ASSERT_GT(best, 0);
  ASSERT_LT(best, 12) << "the model must get worse for this test";
  const auto run = folder_ / "run";
  const auto link = gpt::BestFile::read(run);
  ASSERT_TRUE(link.has_value());
  EXPECT_EQ(gpt::step_of(*link), best);
  EXPECT_TRUE(fs::exists(*link / ".metadata"));
  std::set<int64_t> kept;
  for (const auto& entry : fs::directory_iterator(run / "checkpoints")) {
    kept.insert(gpt::step_of(entry.path()).value_or(-1));
  }
  EXPECT_EQ(kept, (std::set<int64_t>{best, 12}));

  const auto evaluate = [&](const char* from) {
    const auto streams =
        run_apart(alone("run", {"--mode", "eval", "--from", from, "--json"}));
    EXPECT_EQ(streams.exit_code, 0) << streams.err;
    return json::parse(streams.out);
  };
  const auto of_best = evaluate("best");
  EXPECT_EQ(of_best.at("step"), best);
  EXPECT_NEAR(of_best.at("validation_loss"), lowest, 1e-4 * lowest);
  EXPECT_EQ(of_best.at("checkpoint"), link->string());
  EXPECT_EQ(evaluate("newest").at("step"), 12);

  // A resumed run compares with it, and keeps it even if it is not asked to.
  Words longer = flags;
  longer.insert(longer.end(), {"--steps", "16"});
  must_train(2, "run", longer);
  EXPECT_EQ(
      gpt::step_of(gpt::BestFile::read(run).value()), lowest_in_log().second);
  must_train(1, "run", {"--steps", "20", "--keep", "1", "--lr", "1"});
  EXPECT_TRUE(fs::exists(run / "best" / ".metadata"));

  // The export follows the link.
  const auto exported = convert_model(run / "best", run / "best.safetensors");
  EXPECT_EQ(exported.exit_code, 0) << exported.output;
  EXPECT_TRUE(fs::exists(run / "best.safetensors"));
}

TEST_F(GptOutputsTest, ARunWithoutABestOneSaysSo) {
  must_train(1, "run", {"--steps", "4"});
  const auto result = train(2, "run", {"--mode", "sample", "--from", "best"});
  EXPECT_EQ(result.exit_code, 2) << result.output;
  EXPECT_THAT(result.output, HasSubstr("no best checkpoint"));
}

TEST_F(GptOutputsTest, SamplingTakesItsLimits) {
  must_train(1, "run", {"--steps", "4"});
  const auto sample = [&](const Words& flags) {
    Words all{"--mode", "sample", "--json", "--sample-tokens", "40"};
    all.insert(all.end(), flags.begin(), flags.end());
    const auto streams = run_apart(alone("run", all));
    EXPECT_EQ(streams.exit_code, 0) << streams.err;
    return json::parse(streams.out).at("text").get<std::string>();
  };
  // The likeliest token only: the seed makes no difference.
  const auto greedy = sample({"--top-k", "1"});
  EXPECT_EQ(greedy, sample({"--top-p", "0.0001"}));
  EXPECT_EQ(greedy, sample({"--top-k", "1", "--temperature", "5"}));
  EXPECT_NE(greedy, sample({"--temperature", "5"}));
  EXPECT_EQ(
      sample({"--temperature", "5"}),
      sample({"--temperature", "5", "--top-k", "100000", "--top-p", "1"}));
}

TEST_F(GptOutputsTest, OtherStepsOnResumeAreTold) {
  must_train(2, "run", {"--steps", "8"});
  const auto same = train(2, "run", {"--steps", "8"});
  EXPECT_THAT(same.output, Not(HasSubstr("the learning rate now falls")));
  const auto longer = train(2, "run", {"--steps", "12"});
  EXPECT_EQ(longer.exit_code, 0) << longer.output;
  EXPECT_THAT(
      longer.output,
      AllOf(
          HasSubstr("the learning rate now falls until step 12, not 8"),
          HasSubstr("--decay-steps 8 keeps the old curve")));
  EXPECT_EQ(num_times(longer.output, "the learning rate now falls"), 1);
  // From the first resumed step on, whatever the checkpoint says.
  EXPECT_EQ(
      log("run", "step").at(8).at("lr").get<double>(),
      gpt::learning_rate({.steps = 12, .warmup = 3}, 8));
  const auto kept = train(2, "run", {"--steps", "14", "--decay-steps", "12"});
  EXPECT_EQ(kept.exit_code, 0) << kept.output;
  EXPECT_THAT(kept.output, Not(HasSubstr("the learning rate now falls")));
  // The rate of a step is the same as in one run with that curve.
  gpt::Settings settings{.steps = 14, .warmup = 3, .decay_steps = 12};
  EXPECT_EQ(
      log("run", "step").back().at("lr").get<double>(),
      gpt::learning_rate(settings, 13));
}

TEST_F(GptOutputsTest, JsonIsAllThatStdoutHas) {
  const auto finished =
      run_apart(alone("run", {"--json", "--peak-tflops", "0.1"}));
  EXPECT_EQ(finished.exit_code, 0) << finished.err;
  EXPECT_EQ(num_times(finished.out, "\n"), 1) << finished.out;
  EXPECT_THAT(
      finished.err, AllOf(HasSubstr("settings:"), HasSubstr("step 12/12")));
  const auto outcome = json::parse(finished.out);
  EXPECT_EQ(outcome.at("status"), "finished");
  EXPECT_EQ(outcome.at("mode"), "train");
  EXPECT_EQ(outcome.at("step"), 12);
  EXPECT_EQ(outcome.at("loss"), losses("run").at(12));
  double lowest = HUGE_VAL;
  for (const auto& entry : log("run", "eval")) {
    lowest = std::min(lowest, entry.at("loss").get<double>());
  }
  EXPECT_EQ(outcome.at("best_validation_loss"), lowest);
  EXPECT_GT(outcome.at("seconds").get<double>(), 0);
  EXPECT_GT(outcome.at("tokens_per_second").get<double>(), 0);
  EXPECT_GT(outcome.at("mfu").get<double>(), 0);
  EXPECT_TRUE(fs::exists(
      fs::path(outcome.at("checkpoint").get<std::string>()) / ".metadata"));
  EXPECT_TRUE(outcome.at("error").is_null());

  const auto refused = run_apart(alone("run", {"--json", "--stpes", "3"}));
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(json::parse(refused.out).at("status"), "refused");
  EXPECT_THAT(json::parse(refused.out).at("error"), HasSubstr("--steps meant"));

  const auto failed = run_apart(alone(
      "nan",
      {"--json", "--lr", "1e38", "--min-lr", "0", "--checkpoint-every", "0"}));
  EXPECT_EQ(failed.exit_code, 1);
  const auto failure = json::parse(failed.out);
  EXPECT_EQ(failure.at("status"), "failed");
  EXPECT_EQ(failure.at("mode"), "train");
  EXPECT_GT(failure.at("step"), 0);
  EXPECT_THAT(failure.at("error"), HasSubstr("not finite"));
  EXPECT_TRUE(failure.at("checkpoint").is_null());
}

TEST_F(GptOutputsTest, JsonUnderTheLauncherIsOfRankZero) {
  const auto streams = run_apart(words(2, "run", {"--json"}));
  EXPECT_EQ(streams.exit_code, 0) << streams.err;
  ASSERT_TRUE(streams.out.starts_with("[0] {")) << streams.out;
  EXPECT_EQ(json::parse(streams.out.substr(4)).at("step"), 12);
}

TEST_F(GptOutputsTest, FilesThatCannotBeWrittenDoNotEndTheTraining) {
  fs::create_directories(folder_ / "run" / "metrics.csv");
  std::ofstream(folder_ / "run" / "tensorboard") << "in the way";
  fs::create_directories(folder_ / "run" / "best" / "in_the_way");
  const auto result = train(2, "run", {"--keep-best"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("CsvLog: "),
          HasSubstr("EventWriter: "),
          HasSubstr("RUN/best may not name")));
  EXPECT_EQ(losses("run").size(), kSteps);
}

} // namespace
} // namespace tessera
