// Compares plans of an exported program with the memory of real runs.
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/engine/parameters.h>
#include <tessera/exported/units.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/recompute/recompute.h>

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/disk/source.h"
#include "plan/checkpoint_model.h"
#include "plan/plan.h"
#include "support/memory_meter.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the harness of these tests
using plan::Engine;
using plan::Plan;
using plan::ProgramSubject;
using plan::TrainingSetup;

constexpr double kProgramTolerance = 0.02;
constexpr int kProgramSteps = 4;
constexpr int64_t kProgramBatch = 8;
constexpr int64_t kProgramLength = 48;
constexpr int64_t kProgramVocabulary = 256;
constexpr const char* kArchive = TESSERA_EXPORTED_DATA "/tiny_llama_like.pt2";

struct ProgramCase {
  const char* name;
  bool recomputes;
  TrainingSetup setup;

  friend std::ostream& operator<<(std::ostream& out, const ProgramCase& one) {
    return out << one.name;
  }
};

struct MeasuredStep {
  double rest = 0; // between steps
  double saved = 0; // by forward, with what it gathered
  double peak = 0;
};

ProgramSubject subject_of(bool recomputes) {
  const auto found = plan::model_of(
      *checkpoint::Source::open(kArchive), plan::CheckpointOptions());
  return {
      .model = found.model,
      .run = {
          .program = plan::read_training_program(kArchive),
          .params = found.places,
          .sizes = {.batch = kProgramBatch, .length = kProgramLength},
          .recomputes = recomputes}};
}

/// The last of a few steps, by when buffers are recycled and the optimizer has
/// state.
MeasuredStep train(
    MemoryMeter& meter,
    torch::optim::Optimizer& optimizer,
    const std::function<at::Tensor(const at::Tensor&)>& forward) {
  MeasuredStep measured;
  const auto live = [&] { return static_cast<double>(meter.live_bytes()); };
  for (int step = 0; step < kProgramSteps; ++step) {
    measured.rest = live();
    meter.reset_peak();
    const auto ids = torch::randint(
        kProgramVocabulary, {kProgramBatch, kProgramLength}, torch::kLong);
    const auto targets = torch::randint(
        kProgramVocabulary, {kProgramBatch * kProgramLength}, torch::kLong);
    const at::Tensor loss =
        torch::cross_entropy_loss(forward(ids).flatten(0, 1), targets);
    measured.saved = live() - measured.rest;
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  measured.peak = static_cast<double>(meter.peak_bytes());
  return measured;
}

MeasuredStep measure(const ProgramCase& one) {
  at::set_num_threads(1);
  MemoryMeter meter;
  auto model = load_exported(kArchive);
  const auto forward = [&](const at::Tensor& ids) {
    return model->forward(ids);
  };
  if (one.recomputes) {
    EXPECT_EQ(
        apply_activation_checkpointing(model, choose_by_path("layers\\.\\d+")),
        2);
  }
  if (one.setup.engine == Engine::Ddp) {
    DistributedDataParallel ddp(model);
    optim::AdamW optimizer(parameters(model), 1e-3);
    return train(meter, optimizer, forward);
  }
  fully_shard(
      model,
      FullyShardOptions()
          .layout(
              one.setup.layout == engine::Layout::Kind::Flat
                  ? ShardLayout::Flat
                  : ShardLayout::Dim0)
          .policy(block_policy(model)));
  optim::AdamW optimizer(parameters(model), 1e-3);
  return train(meter, optimizer, forward);
}

class MeasuredProgramTest : public ::testing::TestWithParam<ProgramCase> {};

TEST_P(MeasuredProgramTest, IsWithinTwoPercentOfARealRun) {
  const ProgramCase& one = GetParam();
  on_ranks(static_cast<int>(one.setup.world()), [&](const Group& world) {
    const Plan plan = make_plan(subject_of(one.recomputes), one.setup);
    const MeasuredStep measured = measure(one);
    const auto expect_near = [&](const char* what, int64_t planned, double at) {
      const at::Tensor most = torch::full({1}, at, at::kDouble);
      world.all_reduce(most, ReduceOp::Max); // the plan is of the fullest rank
      const auto found = most.item<double>();
      EXPECT_NEAR(
          static_cast<double>(planned), found, kProgramTolerance * found)
          << what;
    };
    EXPECT_TRUE(plan.unknown_operators.empty());
    expect_near("rest", plan.at_rest.total(), measured.rest);
    expect_near(
        "saved",
        plan.after_forward.total() - plan.before_forward.total(),
        measured.saved);
    expect_near("peak", plan.device.at_peak.total(), measured.peak);
  });
}

std::vector<ProgramCase> program_cases() {
  const auto sharded = [](int64_t shards, engine::Layout::Kind layout) {
    return TrainingSetup{
        .shards = shards, .layout = layout, .device = plan::Device::Cpu};
  };
  const TrainingSetup copies{
      .engine = Engine::Ddp, .copies = 2, .device = plan::Device::Cpu};
  using Kind = engine::Layout::Kind;
  return {
      {"Sharded1", false, sharded(1, Kind::Flat)},
      {"Sharded2", false, sharded(2, Kind::Flat)},
      {"Sharded2Rows", false, sharded(2, Kind::Dim0)},
      {"Sharded1Recomputed", true, sharded(1, Kind::Flat)},
      {"Sharded2Recomputed", true, sharded(2, Kind::Flat)},
      {"Ddp2", false, copies},
      {"Ddp2Recomputed", true, copies},
  };
}

INSTANTIATE_TEST_SUITE_P(
    Setups,
    MeasuredProgramTest,
    ::testing::ValuesIn(program_cases()),
    [](const auto& test) { return std::string(test.param.name); });

} // namespace
} // namespace tessera
