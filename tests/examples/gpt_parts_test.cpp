// The trainer's parts by themselves: sampling, MFU, the learning rate, the best
// checkpoint.
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include "best.h"
#include "examples/gpt_fixture.h"
#include "flops.h"
#include "learning_rate.h"
#include "outcome.h"
#include "sampling.h"
#include "schedule.h"
#include "settings.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;
using ::testing::Not;

// ---- Sampling ---------------------------------------------------------------

std::vector<double> probabilities(
    const std::vector<double>& wanted,
    gpt::SamplingOptions options) {
  const auto logits = torch::tensor(wanted, torch::kDouble).log();
  const auto found = gpt::next_token_probabilities(logits, options);
  return {
      found.const_data_ptr<double>(),
      found.const_data_ptr<double>() + found.numel()};
}

void expect_probabilities(
    const gpt::SamplingOptions& options,
    const std::vector<double>& expected,
    const std::vector<double>& of = {0.1, 0.4, 0.2, 0.3}) {
  const auto found = probabilities(of, options);
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-12) << i;
  }
}

TEST(GptSamplingTest, WithoutLimitsNoTokenIsLost) {
  expect_probabilities({}, {0.1, 0.4, 0.2, 0.3});
  // Also in the last bit.
  const auto logits = torch::randn({100});
  EXPECT_TRUE(torch::equal(
      gpt::next_token_probabilities(logits, {.temperature = 0.7}),
      torch::softmax(logits / 0.7, 0)));
  EXPECT_TRUE(torch::equal(
      gpt::next_token_probabilities(logits, {.top_k = 100, .top_p = 1}),
      torch::softmax(logits, 0)));
}

TEST(GptSamplingTest, TopKKeepsTheLikeliest) {
  expect_probabilities({.top_k = 1}, {0, 1, 0, 0});
  expect_probabilities({.top_k = 2}, {0, 4.0 / 7, 0, 3.0 / 7});
  expect_probabilities({.top_k = 4}, {0.1, 0.4, 0.2, 0.3});
  expect_probabilities({.top_k = 1000}, {0.1, 0.4, 0.2, 0.3});
}

TEST(GptSamplingTest, TopPKeepsTheFewestThatHaveTheShare) {
  expect_probabilities({.top_p = 1e-9}, {0, 1, 0, 0}); // at least one
  expect_probabilities({.top_p = 0.39}, {0, 1, 0, 0});
  expect_probabilities({.top_p = 0.41}, {0, 4.0 / 7, 0, 3.0 / 7});
  expect_probabilities({.top_p = 0.71}, {0, 4.0 / 9, 2.0 / 9, 3.0 / 9});
  expect_probabilities({.top_p = 0.95}, {0.1, 0.4, 0.2, 0.3});
}

TEST(GptSamplingTest, BothLimitsApplyOneAfterTheOther) {
  // Of the first two, 4/7 and 3/7, one has half of it.
  expect_probabilities({.top_k = 2, .top_p = 0.5}, {0, 1, 0, 0});
  expect_probabilities({.top_k = 2, .top_p = 0.6}, {0, 4.0 / 7, 0, 3.0 / 7});
}

TEST(GptSamplingTest, OfEqualTokensTheFirstRemain) {
  const std::vector<double> equal(5, 0.2);
  expect_probabilities({.top_k = 2}, {0.5, 0.5, 0, 0, 0}, equal);
  expect_probabilities(
      {.top_p = 0.5}, {1.0 / 3, 1.0 / 3, 1.0 / 3, 0, 0}, equal);
  expect_probabilities(
      {.top_k = 2}, {1.0 / 3, 2.0 / 3, 0, 0}, {0.2, 0.4, 0.2, 0.2});
}

TEST(GptSamplingTest, ALowTemperatureIsSafeWithEveryLimit) {
  expect_probabilities({.temperature = 0.01, .top_k = 3}, {0, 1, 0, 0});
}

// ---- MFU --------------------------------------------------------------------

TEST(GptFlopsTest, ATokenTakesSixPerParameterAndAttention) {
  // GPT-2: 124 million parameters with 1024 positions, of width 768.
  const gpt::GptConfig config{
      .vocabulary = 50257,
      .length = 1024,
      .layers = 12,
      .heads = 12,
      .width = 768};
  EXPECT_EQ(
      gpt::flops_per_token(config, 124439808),
      6.0 * (124439808 - 1024 * 768) + 12.0 * 12 * 768 * 1024);
}

TEST(GptFlopsTest, PeaksAreKnownByTheNamesOfGpus) {
  using gpt::Arithmetic;
  const auto half = [](const char* name) {
    return gpt::peak_tflops_of(name, Arithmetic::Half);
  };
  EXPECT_EQ(half("NVIDIA H200"), 989.4);
  EXPECT_EQ(half("NVIDIA H100 80GB HBM3"), 989.4);
  EXPECT_EQ(half("NVIDIA H100 PCIe"), 756);
  EXPECT_EQ(half("NVIDIA H800 PCIe"), 756);
  EXPECT_EQ(half("NVIDIA A100-SXM4-40GB MIG 1g.5gb"), std::nullopt);
  EXPECT_EQ(half("NVIDIA A100-SXM4-80GB"), 312);
  EXPECT_EQ(half("NVIDIA H20"), 148);
  EXPECT_EQ(half("NVIDIA L40S"), 362);
  EXPECT_EQ(half("NVIDIA L4"), 121);
  EXPECT_EQ(half("NVIDIA A10G"), 70);
  EXPECT_EQ(
      gpt::peak_tflops_of("NVIDIA A100-PCIE-40GB", Arithmetic::TensorFloat32),
      156);
  EXPECT_EQ(
      gpt::peak_tflops_of("NVIDIA A100-PCIE-40GB", Arithmetic::Float32), 19.5);
  EXPECT_EQ(half("NVIDIA H2000"), std::nullopt); // no guess by a beginning
  EXPECT_EQ(half("NVIDIA GeForce RTX 4090"), std::nullopt);
  EXPECT_EQ(half(""), std::nullopt);
}

TEST(GptFlopsTest, TheFlagWinsAndCpusHaveNoPeakWithoutIt) {
  gpt::Settings settings;
  EXPECT_EQ(gpt::peak_tflops(settings, torch::kCPU), std::nullopt);
  settings.peak_tflops = 0.5;
  EXPECT_EQ(gpt::peak_tflops(settings, torch::kCPU), 0.5);
}

// ---- The learning rate ------------------------------------------------------

TEST(GptLearningRateTest, FallsUntilDecayStepsAndStaysThere) {
  gpt::Settings settings{.steps = 100, .lr = 1, .min_lr = 0.1, .warmup = 10};
  const double at_50 = gpt::learning_rate(settings, 50);
  settings.steps = 1000;
  settings.decay_steps = 100;
  EXPECT_EQ(gpt::learning_rate(settings, 50), at_50);
  EXPECT_EQ(gpt::learning_rate(settings, 9), 1);
  EXPECT_NEAR(gpt::learning_rate(settings, 55), 0.55, 1e-12); // half way
  EXPECT_NEAR(gpt::learning_rate(settings, 100), 0.1, 1e-12);
  EXPECT_NEAR(gpt::learning_rate(settings, 999), 0.1, 1e-12);
}

TEST(GptLearningRateTest, TheScheduleIsTheCurveOfTheFlags) {
  const gpt::Settings settings{
      .steps = 9, .lr = 1, .min_lr = 0.1, .warmup = 3, .decay_steps = 7};
  torch::optim::SGD optimizer({torch::zeros({2})}, /*lr=*/1);
  gpt::Schedule schedule(optimizer, settings);
  for (int64_t step = 0; step < settings.steps; ++step) {
    EXPECT_EQ(
        optimizer.param_groups()[0].options().get_lr(),
        gpt::learning_rate(settings, step)); // bit by bit
    optimizer.step();
    schedule.step();
  }
}

TEST(GptLearningRateTest, AResumedScheduleGoesOnFromItsStepOnTheNewCurve) {
  const gpt::Settings before{.steps = 9, .lr = 1, .min_lr = 0.1, .warmup = 3};
  const gpt::Settings after{.steps = 20, .lr = 2, .min_lr = 0.5, .warmup = 2};
  torch::optim::SGD optimizer({torch::zeros({2})}, /*lr=*/1);
  gpt::Schedule saved(optimizer, before);
  for (int64_t step = 0; step < 5; ++step) {
    saved.step();
  }
  torch::optim::SGD other({torch::zeros({2})}, /*lr=*/1);
  gpt::Schedule resumed(other, after);
  resumed.load_state_dict(saved.state_dict());
  EXPECT_EQ(resumed.last_epoch(), 5);
  EXPECT_EQ(
      other.param_groups()[0].options().get_lr(), gpt::learning_rate(after, 5));
}

// ---- How a run ended --------------------------------------------------------

TEST(GptOutcomeTest, IsOneObjectOnOneLineWhateverIsInIt) {
  const auto text = gpt::json_of(
      {.mode = "sample",
       .status = "finished",
       .step = 7,
       .loss = std::nan(""),
       .text = "a\nb\xff"});
  EXPECT_THAT(text, Not(HasSubstr("\n")));
  const auto found = json::parse(text);
  EXPECT_EQ(found.at("status"), "finished");
  EXPECT_EQ(found.at("step"), 7);
  EXPECT_EQ(found.at("loss"), "nan");
  EXPECT_EQ(found.at("text"), "a\nb\xEF\xBF\xBD");
  EXPECT_TRUE(found.at("checkpoint").is_null());
  EXPECT_TRUE(found.at("best_validation_loss").is_null());
}

// ---- The best checkpoint ----------------------------------------------------

class GptBestTest : public GptTest {
 protected:
  fs::path run() {
    const auto run = folder_ / "run";
    fs::create_directories(run / "checkpoints");
    return run;
  }
  static fs::path checkpoint(int64_t step) {
    char name[32];
    std::snprintf(name, sizeof(name), "step_%08ld", step);
    return name;
  }
  /// The step of the best one that a run which starts again finds.
  std::optional<int64_t> best_at(
      int64_t last,
      const std::set<int64_t>& complete) {
    gpt::BestFile file(run());
    const auto found =
        file.open(last, [&](int64_t step) { return complete.contains(step); });
    file.repair();
    return found ? std::optional(found->step) : std::nullopt;
  }
};

TEST_F(GptBestTest, AfterAKillAnywhereTheBestCompleteOneIsTold) {
  {
    gpt::BestFile file(run());
    EXPECT_EQ(file.open(0, [](int64_t) { return true; }), std::nullopt);
    EXPECT_EQ(gpt::BestFile::read(run()), std::nullopt);
    file.announce({.step = 10, .loss = 3});
    file.point_to(run() / "checkpoints" / checkpoint(10));
    EXPECT_EQ(
        gpt::BestFile::read(run()), run() / "checkpoints" / checkpoint(10));
    file.announce({.step = 20, .loss = 2});
  }
  // Killed while it saved step 20, and after that.
  EXPECT_EQ(best_at(20, {10}), 10);
  {
    gpt::BestFile file(run());
    file.open(10, [](int64_t) { return true; });
    file.announce({.step = 20, .loss = 2});
  }
  EXPECT_EQ(best_at(20, {10, 20}), 20);
  EXPECT_EQ(
      gpt::step_of(gpt::BestFile::read(run()).value()), 20); // made to agree
}

TEST_F(GptBestTest, WhatARunHasGoneBackFromIsForgotten) {
  {
    gpt::BestFile file(run());
    for (const auto& [step, loss] :
         std::map<int64_t, double>{{10, 3}, {20, 2}, {30, 1}}) {
      file.announce({.step = step, .loss = loss});
      file.point_to(run() / "checkpoints" / checkpoint(step));
    }
  }
  EXPECT_EQ(best_at(25, {10, 20, 30}), 20);
  EXPECT_EQ(best_at(30, {10, 20, 30}), 20); // for good
  EXPECT_EQ(gpt::step_of(gpt::BestFile::read(run()).value()), 20);
  EXPECT_EQ(best_at(5, {10, 20, 30}), std::nullopt);
  EXPECT_EQ(gpt::BestFile::read(run()), std::nullopt);
}

TEST_F(GptBestTest, AFileOfAnotherHandIsNoCandidate) {
  std::ofstream(run() / "best.json")
      << R"([1, {"step": "x"}, {"step": 5, "validation_loss": 2.5}, {}])";
  EXPECT_EQ(best_at(9, {5}), 5);
  std::ofstream(run() / "best.json") << "{";
  fs::remove(run() / "best");
  EXPECT_EQ(best_at(9, {5}), std::nullopt);
}

TEST_F(GptBestTest, TheLinkAloneKeepsTheBest) {
  {
    gpt::BestFile file(run());
    file.announce({.step = 5, .loss = 2.5});
    file.point_to(run() / "checkpoints" / checkpoint(5));
  }
  std::ofstream(run() / "best.json") << ""; // lost in a power failure
  EXPECT_EQ(best_at(9, {5, 9}), 5);
  EXPECT_EQ(gpt::step_of(gpt::BestFile::read(run()).value()), 5);
  EXPECT_EQ(best_at(9, {9}), std::nullopt);
}

} // namespace
} // namespace tessera
