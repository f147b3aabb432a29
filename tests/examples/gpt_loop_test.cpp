// What the trainer's loop takes from the library: the place in the data, loss
// scaling, and both in checkpoints.
#include <tessera/checkpoint/checkpoint.h>

#include <filesystem>
#include <set>

#include "examples/gpt_fixture.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class GptLoopTest : public GptTest {
 protected:
  fs::path checkpoint_of(const std::string& run, int64_t step) {
    char name[32];
    std::snprintf(name, sizeof(name), "step_%08ld", step);
    return folder_ / run / "checkpoints" / name;
  }
  /// A part of a checkpoint, "data" or "scaler".
  StateDict part(
      const std::string& run,
      int64_t step,
      const std::string& name) {
    return checkpoint::read(
               checkpoint_of(run, step),
               [&](const std::string& key) {
                 return key.starts_with(name + ".");
               })
        .at(name)
        .dict();
  }
  /// The steps that the scaler left out.
  std::set<int64_t> skipped(const std::string& run) {
    std::set<int64_t> steps;
    for (const auto& entry : log(run, "step")) {
      if (entry.value("skipped", false)) {
        steps.insert(entry.at("step").get<int64_t>());
      }
    }
    return steps;
  }
  /// What the losses of each step were scaled by, the last time it was made.
  std::map<int64_t, double> scales(const std::string& run) {
    std::map<int64_t, double> scales;
    for (const auto& entry : log(run, "step")) {
      scales[entry.at("step")] = entry.at("loss_scale");
    }
    return scales;
  }
};

// ---- The place in the data --------------------------------------------------

TEST_F(GptLoopTest, OtherRanksGoOnWithTheWindowsThatAreLeft) {
  // 47 windows: the run goes through two epochs, 8 windows per step.
  const Words few{"--text-bytes", "800", "--keep", "0"};
  Words one_by_one = few;
  one_by_one.insert(one_by_one.end(), {"--micro-batch", "1"});
  must_train(2, "whole", few);
  // Dies in epoch 2, and resumes from the end of epoch 1.
  must_die_and_resume(2, 4, "resumed", few, one_by_one);
  expect_near("resumed", "whole");
  const auto again =
      train(1, "resumed", {"--steps", "16", "--keep", "0", "--resume", "must"});
  EXPECT_THAT(
      again.output,
      HasSubstr("resumed from step 12, window 2 of 47 in epoch 3"));
  for (const auto& [step, epoch, samples] :
       {std::tuple(4, 0, 32), std::tuple(8, 1, 17), std::tuple(16, 2, 34)}) {
    const auto data = part("resumed", step, "data");
    EXPECT_EQ(data.at("epoch").to_int(), epoch) << "step " << step;
    EXPECT_EQ(data.at("samples").to_int(), samples) << "step " << step;
  }
}

TEST_F(GptLoopTest, CheckpointsOfEarlierVersionsAreReadButNotResumed) {
  must_train(2, "run", {"--steps", "4"});
  const auto path = checkpoint_of("run", 4);
  auto state = checkpoint::read(path);
  StateDict old;
  for (const char* name : {"model", "optim", "rng"}) {
    old.set(name, state.at(name));
  }
  old.set("values", StateDict{{"step", 4}, {"windows_seen", 32}});
  checkpoint::save(old, path, checkpoint::SaveOptions().overwrite(true));
  const auto resumed = train(2, "run");
  EXPECT_EQ(resumed.exit_code, 1) << resumed.output;
  EXPECT_THAT(
      resumed.output,
      AllOf(
          HasSubstr("saved by an earlier version of this program"),
          HasSubstr("--mode eval")));
  const auto evaluated = train(2, "run", {"--mode", "eval"});
  EXPECT_EQ(evaluated.exit_code, 0) << evaluated.output;
  EXPECT_THAT(evaluated.output, HasSubstr("step 4: validation loss"));
}

// ---- float16 ----------------------------------------------------------------

class GptFloat16Test : public GptLoopTest,
                       public ::testing::WithParamInterface<const char*> {
 protected:
  /// Two micro-batches per rank, so that a scale holds for a whole step.
  Words flags(const Words& more = {}) {
    Words words{
        "--precision", "fp16", "--strategy", GetParam(), "--micro-batch", "2"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

TEST_P(GptFloat16Test, AnOverflowOnOneRankCostsAStepOnAll) {
  must_train(2, "plain", {"--strategy", GetParam()});
  // Ranks that had not agreed would save copies that differ, or units of
  // different steps: the save compares them.
  must_train(2, "half", flags({"--overflow-at", "5"}));
  EXPECT_EQ(skipped("half"), std::set<int64_t>{5});
  for (const auto& [step, scale] : scales("half")) {
    EXPECT_EQ(scale, step <= 5 ? 65536 : 32768) << "step " << step;
  }
  const auto found = losses("half");
  const auto expected = losses("plain");
  ASSERT_EQ(found.size(), kSteps);
  EXPECT_NE(found.at(1), expected.at(1)); // it is not fp32
  for (int64_t step = 1; step <= 5; ++step) {
    EXPECT_NEAR(found.at(step), expected.at(step), 0.02) << step;
  }
  EXPECT_NEAR(found.at(kSteps), expected.at(kSteps), 0.2);
  EXPECT_LT(found.at(kSteps), found.at(5));
}

TEST_P(GptFloat16Test, TheScaleIsResumed) {
  must_train(2, "whole", flags({"--overflow-at", "3"}));
  must_die_and_resume(2, 2, "resumed", flags({"--overflow-at", "3"}), flags());
  expect_same_bits("resumed", "whole");
  EXPECT_EQ(scales("resumed"), scales("whole"));
  EXPECT_EQ(scales("resumed").at(5), 32768);
  EXPECT_EQ(part("resumed", 12, "scaler").at("_growth_tracker").to_int(), 9);
}

INSTANTIATE_TEST_SUITE_P(
    Strategies,
    GptFloat16Test,
    ::testing::Values("fsdp", "ddp", "zero"),
    [](const auto& strategy) { return std::string(strategy.param); });

TEST_F(GptLoopTest, ARunMayTurnToFloat16AndBack) {
  must_train(2, "run", {"--steps", "4"});
  must_train(2, "run", {"--steps", "8", "--precision", "fp16"});
  EXPECT_EQ(log("run", "step").at(4).at("loss_scale"), 65536);
  must_train(2, "run", {"--precision", "bf16"});
  EXPECT_EQ(losses("run").size(), kSteps);
  EXPECT_FALSE(log("run", "step").at(8).contains("loss_scale"));
}

TEST_F(GptLoopTest, GradientsThatNoScaleHelpsEndTheRun) {
  const auto result = train(
      2,
      "run",
      {"--precision",
       "fp16",
       "--lr",
       "1e38",
       "--min-lr",
       "0",
       "--warmup",
       "2",
       "--steps",
       "40",
       "--eval-every",
       "0",
       "--checkpoint-every",
       "0"});
  EXPECT_EQ(result.exit_code, 1) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(
          HasSubstr("the gradients of step 18 are not finite"),
          HasSubstr("the scale has fallen below 1")));
  EXPECT_EQ(log("run", "step").size(), 17u);
}

TEST_F(GptLoopTest, WithoutAScalerGradientsThatAreNotFiniteEndTheRun) {
  for (const char* precision : {"fp32", "bf16"}) {
    const auto result =
        train(2, precision, {"--precision", precision, "--overflow-at", "3"});
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_THAT(
        result.output,
        AllOf(
            HasSubstr("the gradients of step 3 are not finite"),
            Not(HasSubstr("scale"))));
    EXPECT_EQ(losses(precision).size(), 2u);
  }
}

TEST_F(GptLoopTest, TheLineTellsTheScaleAndWhatWasSkipped) {
  const auto result =
      train(1, "run", {"--precision", "fp16", "--overflow-at", "12"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("grad nan  scale 65536, 1 skipped  "));
  const auto plain = train(1, "plain");
  EXPECT_THAT(plain.output, Not(HasSubstr("scale")));
}

} // namespace
} // namespace tessera
