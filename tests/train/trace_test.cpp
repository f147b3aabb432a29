#include <tessera/train/trace.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <vector>

#include "checkpoint/support.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "train/layers.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using TraceJson = nlohmann::json;
using ::testing::HasSubstr;

struct Event {
  std::string name;
  std::string thread;
  double start;
  double end;
};

/// The events that have a duration.
std::vector<Event> read(const fs::path& path) {
  std::ifstream in(path);
  std::vector<Event> events;
  const TraceJson trace = TraceJson::parse(in);
  for (const TraceJson& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X") {
      const auto start = event.at("ts").get<double>();
      events.push_back(
          {event.at("name"),
           event.at("pid").dump() + '/' + event.at("tid").dump(),
           start,
           start + event.at("dur").get<double>()});
    }
  }
  return events;
}

std::set<std::string> names_of(const std::vector<Event>& events) {
  std::set<std::string> names;
  for (const Event& event : events) {
    names.insert(event.name);
  }
  return names;
}

/// On each thread an event lies inside another one or beside it.
void expect_nested(std::vector<Event> events) {
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.start != b.start ? a.start < b.start : a.end > b.end;
  });
  constexpr double kRounding = 0.002; // microseconds
  std::map<std::string, std::vector<Event>> open;
  for (const Event& event : events) {
    if (event.name.starts_with("PyTorch Profiler") ||
        event.name.starts_with("Record Window")) {
      continue;
    }
    auto& stack = open[event.thread];
    while (!stack.empty() && stack.back().end <= event.start + kRounding) {
      stack.pop_back();
    }
    if (!stack.empty()) {
      EXPECT_LE(event.end, stack.back().end + kRounding)
          << event.name << " crosses the end of " << stack.back().name;
    }
    stack.push_back(event);
  }
}

TEST(TraceTest, ATraceHasTheNamesOfUnitsOnEveryRank) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const auto model = make_layers();
    model->shard();
    StepTrace trace(folder / "trace", 2, 3);
    EXPECT_EQ(
        trace.path(),
        folder / ("trace/rank" + std::to_string(world.rank()) + ".json"));
    for (int64_t step = 0; step < 6; ++step) {
      trace.at_step(step);
      EXPECT_EQ(fs::exists(trace.path()), step > 3);
      model->forward(torch::ones({4, Layers::kSize})).sum().backward();
    }
    const auto events = read(trace.path());
    const auto names = names_of(events);
    for (const char* unit :
         {"layer0", "layer1", "layer2", "layer3", kRootName}) {
      for (const char* what : {"gather ", "reduce ", "wait for "}) {
        EXPECT_TRUE(names.contains(std::string(what) + unit)) << what << unit;
      }
    }
    EXPECT_TRUE(names.contains("aten::matmul"));
    EXPECT_TRUE(names.contains("step 2"));
    EXPECT_TRUE(names.contains("step 3"));
    EXPECT_FALSE(names.contains("step 1"));
    EXPECT_FALSE(names.contains("step 4"));
    expect_nested(events);
    // Two steps, in each of which layer1 comes for forward and for backward.
    EXPECT_EQ(
        std::count_if(
            events.begin(),
            events.end(),
            [](const Event& event) { return event.name == "gather layer1"; }),
        4);
    EXPECT_FALSE(at::hasCallbacks());
  });
}

TEST(TraceTest, TheEndOfTrainingEndsATrace) {
  const TempFolder folder;
  {
    StepTrace trace(folder / "deep/trace", 1, 100);
    trace.at_step(0);
    trace.at_step(5); // the first that is in the range
    torch::ones({4}).add(1);
  }
  const auto names = names_of(read(folder / "deep/trace/rank0.json"));
  EXPECT_TRUE(names.contains("step 5"));
  EXPECT_TRUE(names.contains("aten::add"));
  StepTrace unused(folder / "unused", 7, 7);
  unused.at_step(3);
  unused.close();
  EXPECT_FALSE(fs::exists(folder / "unused"));
}

TEST(TraceTest, AFolderThatCannotBeMadeDoesNotStopTraining) {
  const TempFolder folder;
  std::ofstream(folder / "trace") << "a file is in the way";
  StepTrace trace(folder / "trace", 0, 0);
  trace.at_step(0);
  EXPECT_NO_THROW(trace.at_step(1));
  EXPECT_TRUE(fs::is_regular_file(folder / "trace"));
}

TEST(TraceTest, StepsInTheWrongOrderAreRefused) {
  EXPECT_THAT(error_of([] { StepTrace("x", 3, 2); }), HasSubstr("comes after"));
}

} // namespace
} // namespace tessera
