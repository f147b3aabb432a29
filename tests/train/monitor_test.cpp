#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/optim/adamw.h>
#include <tessera/train/monitor.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <thread>

#include "comm/diagnostics/observer.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "train/layers.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kSteps = 4; // by the third one buffers are recycled
constexpr double kSlack = 0.02; // share of the whole by which a kind may be off

template <class Optimizer>
StepReport watch(
    Layers& model,
    Optimizer& optimizer,
    int64_t batch,
    bool timeline = false) {
  return testing::watch(
      model, optimizer, torch::ones({batch, Layers::kSize}), kSteps, timeline);
}

void expect_near(int64_t found, double expected, const MemoryByKind& memory) {
  EXPECT_NEAR(
      static_cast<double>(found),
      expected,
      kSlack * static_cast<double>(memory.total()));
}

std::vector<std::string> names_in(const StepReport& report, TimelineLane lane) {
  std::vector<std::string> names;
  for (const TimelineSpan& span : report.spans) {
    if (span.lane == lane && (names.empty() || names.back() != span.name)) {
      names.push_back(span.name);
    }
  }
  return names;
}

/// Spans of one lane follow each other.
void expect_no_overlap(
    const StepReport& report,
    std::vector<TimelineLane> lanes) {
  double end = 0;
  for (const TimelineSpan& span : report.spans) {
    if (std::find(lanes.begin(), lanes.end(), span.lane) != lanes.end()) {
      EXPECT_GE(span.start, end - 1e-9) << span.name;
      end = span.end;
    }
  }
}

void expect_within_step(const StepReport& report) {
  for (const TimelineSpan& span : report.spans) {
    EXPECT_GE(span.start, 0) << span.name;
    EXPECT_GE(span.end, span.start) << span.name;
    EXPECT_LE(span.end, report.seconds) << span.name;
  }
}

double seconds_in(const StepReport& report, TimelineLane lane) {
  double sum = 0;
  for (const TimelineSpan& span : report.spans) {
    sum += span.lane == lane ? span.end - span.start : 0;
  }
  return sum;
}

const std::vector<std::string> kForward{
    "layer0 forward",
    "layer1 forward",
    "layer2 forward",
    "layer3 forward"};
const std::vector<std::string> kBackward{
    "layer3 backward",
    "layer2 backward",
    "layer1 backward"};

TEST(MonitorTest, MemoryOfAPlainModelAddsUpWhereGradientsArePeak) {
  const auto model = make_layers();
  optim::AdamW optimizer(model->parameters(), 1e-3);
  const StepReport report = watch(*model, optimizer, /*batch=*/1);
  const MemoryByKind& memory = report.memory;
  EXPECT_EQ(memory.shards, Layers::kBytes);
  EXPECT_EQ(memory.full, 0);
  // Two moments, and a float for the step of each parameter.
  EXPECT_EQ(memory.optimizer, 2 * Layers::kBytes + 4 * (Layers::kCount + 1));
  expect_near(memory.gradients, Layers::kBytes, memory);
  EXPECT_GT(report.seconds, 0);
  EXPECT_TRUE(report.spans.empty());
}

TEST(MonitorTest, MemoryOfAPlainModelAddsUpWhereActivationsArePeak) {
  const auto model = make_layers();
  optim::AdamW optimizer(model->parameters(), 1e-3);
  constexpr int64_t kBatch = 4096;
  const StepReport report = watch(*model, optimizer, kBatch);
  const double layer = kBatch * Layers::kSize * 4.0;
  // All outputs of relu are saved. Beside them the last layer holds its own
  // output, or the first backward the gradient with respect to it.
  const auto activations = static_cast<double>(report.memory.activations);
  EXPECT_GE(activations, Layers::kCount * layer);
  EXPECT_LE(activations, (Layers::kCount + 2.25) * layer);
  EXPECT_EQ(report.memory.shards, Layers::kBytes);
  EXPECT_LE(report.memory.gradients, Layers::kBytes);
  // The input was there before.
  EXPECT_GE(static_cast<double>(report.memory.other), layer);
}

TEST(MonitorTest, MemoryOfAShardedModelAddsUp) {
  on_ranks(2, [](const Group&) {
    const auto model = make_layers();
    model->shard();
    optim::AdamW optimizer(parameters(*model), 1e-3);
    const StepReport report = watch(*model, optimizer, /*batch=*/1);
    const MemoryByKind& memory = report.memory;
    EXPECT_EQ(memory.shards, Layers::kBytes / 2);
    EXPECT_GE(memory.optimizer, Layers::kBytes);
    EXPECT_LE(memory.optimizer, Layers::kBytes + 4 * (Layers::kCount + 1));
    // The unit in use, the next one and one to spare, which are of one size
    // with gradients on their way; and the root.
    EXPECT_GE(memory.full + memory.gradients, 3 * Layers::kLayerBytes);
    EXPECT_LE(memory.full, 3 * Layers::kLayerBytes + 2 * Layers::kHeadBytes);
    EXPECT_LE(
        memory.gradients,
        Layers::kBytes / 2 + 2 * Layers::kLayerBytes + Layers::kHeadBytes);
    // The gradient of a layer's weight, before it is copied.
    expect_near(memory.activations, Layers::kLayerBytes, memory);
  });
}

TEST(MonitorTest, UnitsHaveTheirSizes) {
  on_ranks(2, [](const Group&) {
    const auto model = make_layers();
    EXPECT_TRUE(StepMonitor(*model).units().empty());
    model->shard();
    const auto units = StepMonitor(*model).units();
    ASSERT_EQ(units.size(), Layers::kCount + 1);
    EXPECT_EQ(units[0].name, kRootName);
    EXPECT_EQ(units[0].parameters, Layers::kSize * Layers::kHead);
    EXPECT_EQ(units[2].name, "layer1");
    EXPECT_EQ(units[2].parameters, Layers::kSize * Layers::kSize);
    EXPECT_EQ(units[2].full_bytes, Layers::kLayerBytes);
    EXPECT_EQ(units[2].shard_bytes, Layers::kLayerBytes / 2);
  });
}

TEST(MonitorTest, DataParallelGradientsAreThereTwiceUnlessTheyLiveInBuckets) {
  on_ranks(2, [](const Group&) {
    for (const bool in_buckets : {false, true}) {
      const auto model = make_layers();
      const DistributedDataParallel<Layers> ddp(
          model, DDPOptions().gradient_as_bucket_view(in_buckets));
      optim::AdamW optimizer(model->parameters(), 1e-3);
      const auto memory = watch(*model, optimizer, /*batch=*/1).memory;
      EXPECT_EQ(memory.shards, Layers::kBytes);
      EXPECT_EQ(memory.full, 0);
      expect_near(
          memory.gradients, (in_buckets ? 1.0 : 2.0) * Layers::kBytes, memory);
    }
  });
}

TEST(MonitorTest, ZeroHasItsShareOfTheOptimizersState) {
  on_ranks(2, [](const Group& world) {
    const auto model = make_layers();
    const DistributedDataParallel<Layers> ddp(model);
    ZeroRedundancyOptimizer optimizer(
        model->parameters(), optimizer_class<optim::AdamW>(1e-3));
    const StepReport report =
        watch(*model, optimizer, /*batch=*/1, /*timeline=*/true);
    // Two layers each; the head belongs to one of them.
    const int64_t own = 2 * 2 * Layers::kLayerBytes;
    EXPECT_GE(report.memory.optimizer, own);
    EXPECT_LE(report.memory.optimizer, own + 2 * Layers::kHeadBytes + 32);
    EXPECT_EQ(names_in(report, TimelineLane::Compute).back(), "optimizer");
    expect_within_step(report);
    (void)world;
  });
}

TEST(MonitorTest, ATimelineFollowsTheSchedule) {
  on_ranks(2, [](const Group&) {
    const auto model = make_layers();
    model->shard();
    optim::AdamW optimizer(parameters(*model), 1e-3);
    const StepReport report =
        watch(*model, optimizer, /*batch=*/64, /*timeline=*/true);
    std::vector<std::string> gathers{"layer0", "layer1", "layer2", "layer3"};
    gathers.emplace_back(kRootName);
    auto found = names_in(report, TimelineLane::Gather);
    // What ranks compare at the end is not a parameter, but it is a gather.
    ASSERT_GE(found.size(), gathers.size());
    found.resize(gathers.size());
    EXPECT_THAT(found, ElementsAreArray(gathers));
    auto reduced = names_in(report, TimelineLane::Reduce);
    std::sort(reduced.begin(), reduced.end());
    EXPECT_THAT(
        reduced,
        ElementsAre("layer0", "layer1", "layer2", "layer3", kRootName));
    std::vector<std::string> computed{"other"};
    computed.insert(computed.end(), kForward.begin(), kForward.end());
    computed.insert(
        computed.end(),
        {std::string(kRootName) + " forward",
         "backward",
         std::string(kRootName) + " backward"});
    computed.insert(computed.end(), kBackward.begin(), kBackward.end());
    const auto names = names_in(report, TimelineLane::Compute);
    ASSERT_GE(names.size(), computed.size() + 1);
    EXPECT_THAT(
        std::vector<std::string>(
            names.begin(),
            names.begin() + static_cast<std::ptrdiff_t>(computed.size())),
        ElementsAreArray(computed));
    EXPECT_EQ(names.back(), "optimizer");
    expect_within_step(report);
    expect_no_overlap(report, {TimelineLane::Compute, TimelineLane::Wait});
    EXPECT_LE(
        seconds_in(report, TimelineLane::Compute) +
            seconds_in(report, TimelineLane::Wait),
        report.seconds);
    EXPECT_GE(
        seconds_in(report, TimelineLane::Compute) +
            seconds_in(report, TimelineLane::Wait),
        0.9 * report.seconds);
  });
}

TEST(MonitorTest, ATimelineOfAPlainModelHasItsChildren) {
  const auto model = make_layers();
  torch::optim::SGD optimizer(
      model->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.1));
  const StepReport report =
      watch(*model, optimizer, /*batch=*/64, /*timeline=*/true);
  std::vector<std::string> expected{"other"};
  expected.insert(expected.end(), kForward.begin(), kForward.end());
  expected.insert(
      expected.end(), {"head forward", "backward", "head backward"});
  expected.insert(expected.end(), kBackward.begin(), kBackward.end());
  expected.emplace_back("optimizer");
  EXPECT_THAT(
      names_in(report, TimelineLane::Compute), ElementsAreArray(expected));
  expect_within_step(report);
  EXPECT_EQ(seconds_in(report, TimelineLane::Wait), 0);
}

TEST(MonitorTest, ATimelineOfDataParallelTrainingHasReductions) {
  on_ranks({.size = 2, .backend = "gloo"}, [](const Group&) {
    const auto model = make_layers();
    const DistributedDataParallel<Layers> ddp(
        model, DDPOptions().first_bucket_mb(0.1).bucket_cap_mb(0.1));
    optim::AdamW optimizer(model->parameters(), 1e-3);
    const StepReport report =
        watch(*model, optimizer, /*batch=*/64, /*timeline=*/true);
    EXPECT_GE(
        std::count_if(
            report.spans.begin(),
            report.spans.end(),
            [](const TimelineSpan& span) {
              return span.lane == TimelineLane::Reduce &&
                  span.name == "ddp: gradients";
            }),
        Layers::kCount);
    expect_within_step(report);
  });
}

TEST(MonitorTest, APhaseHasItsName) {
  const auto model = make_layers();
  StepMonitor monitor(*model);
  monitor.phase("nothing to name yet");
  monitor.begin_step(MonitorOptions().timeline(true));
  monitor.phase("data");
  const at::Tensor x = torch::ones({4, Layers::kSize});
  const at::Tensor loss = model->forward(x).sum();
  monitor.phase("waiting for coffee");
  loss.backward();
  const auto names = names_in(monitor.end_step(), TimelineLane::Compute);
  EXPECT_THAT(
      names,
      AllOf(
          Contains("data"),
          Contains("layer0 forward"),
          Contains("waiting for coffee"),
          Not(Contains("nothing to name yet"))));
}

TEST(MonitorTest, WhatABackgroundThreadSendsIsNotPartOfTheStep) {
  on_ranks(2, [](const Group& world) {
    const auto model = make_layers();
    model->shard();
    const Group other = *world.split(0, 0, "other");
    StepMonitor monitor(*model);
    monitor.begin_step(MonitorOptions().timeline(true));
    std::thread([&] {
      other.all_reduce(torch::ones({4}), ReduceOp::Sum, "somebody else's");
    }).join();
    model->forward(torch::ones({1, Layers::kSize})).sum().backward();
    const StepReport report = monitor.end_step();
    EXPECT_FALSE(names_in(report, TimelineLane::Gather).empty());
    for (const TimelineSpan& span : report.spans) {
      EXPECT_NE(span.name, "somebody else's");
    }
  });
}

/// Collectives that a step starts.
template <class Step>
int64_t collectives_in(const Step& step) {
  int64_t count = 0;
  const comm::CallWatch watch([&](const comm::CallEvent& event) {
    count += event.kind == comm::CallEvent::Kind::Starts ? 1 : 0;
  });
  step();
  return count;
}

TEST(MonitorTest, WatchingStartsNoCollective) {
  on_ranks(2, [](const Group&) {
    const auto model = make_layers();
    model->shard();
    StepMonitor monitor(*model);
    const auto step = [&] {
      model->forward(torch::ones({1, Layers::kSize})).sum().backward();
    };
    const auto watched = [&](bool timeline) {
      return [&, timeline] {
        monitor.begin_step(MonitorOptions().timeline(timeline));
        step();
        (void)monitor.end_step();
      };
    };
    for (int warm_up = 0; warm_up < 2; ++warm_up) {
      step();
    }
    const int64_t alone = collectives_in(step);
    EXPECT_GT(alone, 0);
    EXPECT_EQ(collectives_in(watched(false)), alone);
    EXPECT_EQ(collectives_in(watched(true)), alone);
  });
}

TEST(MonitorTest, WithoutATimelineNoOperatorAndNoCollectiveIsSeen) {
  const auto model = make_layers();
  StepMonitor monitor(*model);
  monitor.begin_step();
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_EQ(comm::next_watched_call(), 0);
  (void)monitor.end_step();
  monitor.begin_step(MonitorOptions().timeline(true));
  EXPECT_TRUE(at::hasThreadLocalCallbacks());
  EXPECT_NE(comm::next_watched_call(), 0);
  (void)monitor.end_step();
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
  EXPECT_EQ(comm::next_watched_call(), 0);
}

TEST(MonitorTest, AStepThatThrewIsForgottenByTheNext) {
  const auto model = make_layers();
  StepMonitor monitor(*model);
  monitor.begin_step(MonitorOptions().timeline(true));
  EXPECT_ANY_THROW(model->forward(torch::ones({1, 3})));
  monitor.begin_step();
  EXPECT_TRUE(monitor.end_step().spans.empty());
  EXPECT_FALSE(at::hasThreadLocalCallbacks());
}

TEST(MonitorTest, OneMonitorAtATimeIsInsideAStep) {
  const auto model = make_layers();
  StepMonitor first(*model);
  StepMonitor second(*model);
  EXPECT_THAT(
      error_of([&] { (void)first.end_step(); }), HasSubstr("begin_step"));
  first.begin_step();
  EXPECT_THAT(
      error_of([&] { second.begin_step(); }), HasSubstr("another monitor"));
  (void)first.end_step();
  second.begin_step();
  (void)second.end_step();
}

} // namespace
} // namespace tessera
