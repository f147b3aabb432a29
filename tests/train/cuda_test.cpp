// Watching a run on a GPU: alone, and two ranks that share it.
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adamw.h>
#include <tessera/train/monitor.h>
#include <tessera/train/trace.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "checkpoint/support.h"
#include "support/ranks.h"
#include "train/layers.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int kSteps = 4;
constexpr int64_t kBatch = 4096;

StepReport watch(
    Layers& model,
    const std::vector<at::Tensor>& leaves,
    bool timeline) {
  optim::AdamW optimizer(leaves, 1e-3);
  const at::Tensor x = torch::ones({kBatch, Layers::kSize}, at::kCUDA);
  return testing::watch(model, optimizer, x, kSteps, timeline);
}

TEST(CudaMonitorTest, MemoryOfAPlainModelAddsUp) {
  on_ranks(1, [](const Group&) {
    const auto model = make_layers();
    model->to(at::kCUDA);
    const MemoryByKind memory =
        watch(*model, model->parameters(), false).memory;
    const double layer = kBatch * Layers::kSize * 4.0;
    EXPECT_EQ(memory.shards, Layers::kBytes);
    EXPECT_GE(memory.optimizer, 2 * Layers::kBytes);
    EXPECT_LE(memory.gradients, Layers::kBytes);
    EXPECT_GE(static_cast<double>(memory.activations), Layers::kCount * layer);
    EXPECT_LE(
        static_cast<double>(memory.activations),
        (Layers::kCount + 2.25) * layer);
    EXPECT_GE(static_cast<double>(memory.other), layer); // the data
  });
}

class CudaTimelineTest : public ::testing::TestWithParam<int> {};

TEST_P(CudaTimelineTest, HasTheUnitsInTheOrderOfTheStep) {
  on_ranks(GetParam(), [](const Group& world) {
    const auto model = make_layers();
    model->to(at::Device(at::kCUDA, 0));
    model->shard();
    const StepReport report = watch(*model, parameters(*model), true);
    std::vector<std::string> names;
    double end = 0;
    for (const TimelineSpan& span : report.spans) {
      EXPECT_GE(span.start, 0);
      EXPECT_LE(span.end, report.seconds);
      if (span.lane == TimelineLane::Compute) {
        EXPECT_GE(span.start, end - 1e-4) << span.name;
        end = span.end;
        names.push_back(span.name);
      }
    }
    const auto place = [&](const std::string& name) {
      EXPECT_THAT(names, Contains(name));
      return std::find(names.begin(), names.end(), name);
    };
    EXPECT_LT(place("layer0 forward"), place("layer3 forward"));
    EXPECT_LT(place("layer3 forward"), place("layer3 backward"));
    EXPECT_LT(place("layer3 backward"), place("layer1 backward"));
    EXPECT_LT(place("layer1 backward"), place("optimizer"));
    EXPECT_EQ(
        std::any_of(
            report.spans.begin(),
            report.spans.end(),
            [](const TimelineSpan& span) {
              return span.lane == TimelineLane::Gather && span.name == "layer1";
            }),
        world.size() > 1);
    EXPECT_EQ(report.memory.shards, Layers::kBytes / world.size());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CudaTimelineTest, ::testing::Values(1, 2));

TEST(CudaTraceTest, ATraceHasKernels) {
  on_ranks(1, [](const Group& world) {
    const TempFolder folder(world);
    const auto model = make_layers();
    model->to(at::kCUDA);
    StepTrace trace(folder.path(), 1, 1);
    for (int64_t step = 0; step < 3; ++step) {
      trace.at_step(step);
      model->forward(torch::ones({4, Layers::kSize}, at::kCUDA)).sum();
    }
    std::stringstream text;
    text << std::ifstream(trace.path()).rdbuf();
    EXPECT_THAT(text.str(), HasSubstr("\"step 1\""));
    EXPECT_THAT(text.str(), HasSubstr("\"cat\": \"kernel\""));
  });
}

} // namespace
} // namespace tessera
