// Compares plans with the peaks and the traffic of real runs.
#include <tessera/comm/mesh.h>
#include <tessera/ddp/distributed_data_parallel.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <map>
#include <set>

#include "engine/module_units.h"
#include "engine/schedule.h"
#include "engine/unit_memory.h"
#include "plan/trained_gpt.h"
#include "support/memory_meter.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the harness of these tests
using format::DType;
using plan::Engine;
using plan::GptShape;
using plan::GptSubject;
using plan::Kind;
using plan::Operation;
using plan::Plan;
using plan::TrainingSetup;

constexpr double kTolerance = 0.05;
constexpr int kSteps = 4;

/// Parameters weigh most.
constexpr GptShape kWide{
    .layers = 4,
    .width = 192,
    .heads = 4,
    .vocabulary = 512,
    .length = 64,
    .is_tied = false};
constexpr GptShape split(GptShape shape) {
  shape.splits_root = true;
  return shape;
}
/// Activations of blocks do.
constexpr GptShape kDeep{
    .layers = 6,
    .width = 64,
    .heads = 2,
    .vocabulary = 64,
    .length = 128,
    .is_tied = true};
/// Logits do.
constexpr GptShape kLong{
    .layers = 3,
    .width = 96,
    .heads = 4,
    .vocabulary = 2048,
    .length = 128,
    .is_tied = true};

struct Case {
  const char* name;
  GptShape shape;
  plan::GptRun run;
  TrainingSetup setup;

  friend std::ostream& operator<<(std::ostream& out, const Case& one) {
    return out << one.name;
  }
};

/// The measurements of a run on this rank.
struct Measured {
  double shards = 0;
  double optimizer = 0;
  double gradients = 0; // of the shards
  double full = 0; // the most at a time
  double saved = 0; // by forward, with what it gathered
  double rest = 0; // between steps
  double peak = 0;
  std::map<Operation, plan::Traffic> wire; // of one step
};

at::ScalarType scalar_type(DType dtype) {
  return dtype == DType::BFloat16 ? at::kBFloat16 : at::kFloat;
}

double bytes_of(const std::vector<at::Tensor>& tensors) {
  std::set<const void*> seen;
  size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() &&
        seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      bytes += tensor.storage().nbytes();
    }
  }
  return static_cast<double>(bytes);
}

double state_bytes(
    optim::AdamW& optimizer,
    const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& param : params) {
    if (const StateDict* state = optimizer.find_state(param)) {
      for (const auto& [name, value] : *state) {
        tensors.push_back(value.tensor());
      }
    }
  }
  return bytes_of(tensors);
}

class TrainingRun {
 public:
  TrainingRun(const Case& one, const Group& world) : case_(one), world_(world) {
    at::set_num_threads(1);
  }

  Measured measure() {
    MemoryMeter meter;
    meter_ = &meter;
    torch::manual_seed(0);
    TrainedGpt model(GptSubject{case_.shape, case_.run});
    if (case_.setup.dtype) {
      model->to(scalar_type(*case_.setup.dtype));
    }
    if (case_.setup.engine == Engine::Sharded) {
      train_sharded(model);
    } else {
      train_copies(model);
    }
    return std::move(measured_);
  }

 private:
  void train_sharded(TrainedGpt& model) {
    const TrainingSetup& setup = case_.setup;
    FullyShardOptions options;
    options.layout(
        setup.layout == engine::Layout::Kind::Flat ? ShardLayout::Flat
                                                   : ShardLayout::Dim0);
    options.reshard_after_forward(setup.reshard_after_forward);
    options.overlap_bytes(setup.overlap_bytes);
    if (setup.copies > 1) {
      options.mesh(make_mesh({setup.copies, setup.shards}));
    }
    if (setup.offload) {
      options.offload_policy(CPUOffloadPolicy{});
    }
    MixedPrecisionPolicy precision;
    if (setup.param_dtype) {
      precision.param_dtype(scalar_type(*setup.param_dtype));
    }
    if (setup.reduce_dtype) {
      precision.reduce_dtype(scalar_type(*setup.reduce_dtype));
    }
    precision.keep_cast_shards(setup.keep_cast_shards);
    options.mp_policy(precision);
    for (const auto& block : *model->blocks) {
      fully_shard(*block, options);
    }
    if (case_.shape.splits_root) {
      fully_shard(model->tokens, options);
      fully_shard(model->head, options);
    }
    fully_shard(*model, options);
    const auto params = parameters(*model);
    optim::AdamW optimizer(params, 1e-3);
    const auto schedule = engine::Schedule::of(world_);
    double full = 0;
    schedule->probe_for_tests().observer =
        [&](const engine::ShardEvent& event) { observe(event, full); };
    train(*model, params, optimizer, [&](bool syncs) {
      set_requires_gradient_sync(*model, syncs);
    });
    schedule->probe_for_tests().observer = nullptr;
    for (const auto& unit : engine::units_in(*model)) { // casts that are kept
      measured_.full += static_cast<double>(engine::full_bytes_now(*unit));
    }
    measured_.optimizer = state_bytes(optimizer, params);
  }

  void observe(const engine::ShardEvent& event, double& full) {
    using EventKind = engine::ShardEvent::Kind;
    if (event.kind == EventKind::Gather) {
      full += static_cast<double>(event.bytes);
      measured_.full = std::max(measured_.full, full);
      if (event.unit.groups().shard.size() > 1) {
        count(
            event.in_backward ? Operation::GatherBackward
                              : Operation::GatherForward,
            event.bytes);
      }
    } else if (event.kind == EventKind::Reshard) {
      full -= static_cast<double>(full_bytes(event.unit));
    } else if (event.kind == EventKind::Reduce) {
      if (case_.setup.shards > 1) {
        count(Operation::ReduceScatter, event.bytes);
      }
      if (case_.setup.copies > 1) {
        count(Operation::AllReduce, event.bytes / case_.setup.shards);
      }
    }
  }

  void train_copies(TrainedGpt& model) {
    DistributedDataParallel ddp(model);
    if (world_.size() > 1) { // a hook makes buckets on one rank too
      ddp.register_comm_hook(
          [this, average = allreduce_hook(world_)](GradBucket& bucket) {
            count(
                Operation::AllReduce,
                static_cast<int64_t>(bucket.buffer().nbytes()));
            return average(bucket);
          });
    }
    const auto set_sync = [&](bool syncs) {
      ddp.set_requires_gradient_sync(syncs);
    };
    const auto params = model->parameters();
    if (case_.setup.engine == Engine::Ddp) {
      optim::AdamW optimizer(params, 1e-3);
      train(*model, params, optimizer, set_sync);
      measured_.optimizer = state_bytes(optimizer, params);
    } else {
      ZeroRedundancyOptimizer optimizer(
          params, optimizer_class<optim::AdamW>(1e-3));
      train(*model, params, optimizer, set_sync);
      measured_.optimizer =
          state_bytes(dynamic_cast<optim::AdamW&>(optimizer.optim()), params);
    }
  }

  /// The last of a few steps, by when buffers are recycled, gathers are ahead
  /// and the optimizer has state.
  void train(
      TrainedGptImpl& model,
      const std::vector<at::Tensor>& params,
      torch::optim::Optimizer& optimizer,
      const std::function<void(bool)>& set_sync) {
    measured_.shards = static_cast<double>(meter_->live_bytes());
    for (int step = 0; step < kSteps; ++step) {
      measured_.wire.clear();
      measured_.full = 0;
      measured_.rest = static_cast<double>(meter_->live_bytes());
      meter_->reset_peak();
      for (int64_t i = 0; i < case_.setup.accumulate; ++i) {
        const bool is_last = i + 1 == case_.setup.accumulate;
        set_sync(case_.setup.syncs_always || is_last);
        const auto before = meter_->live_bytes();
        const auto sizes = {case_.run.batch, case_.shape.length};
        const auto ids =
            torch::randint(case_.shape.vocabulary, sizes, torch::kLong);
        const auto targets =
            torch::randint(case_.shape.vocabulary, sizes, torch::kLong);
        const auto loss = model.loss(ids, targets);
        measured_.saved = static_cast<double>(meter_->live_bytes() - before);
        loss.backward();
      }
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& param : params) {
        gradients.push_back(param.grad());
      }
      measured_.gradients = bytes_of(gradients);
      gradients.clear();
      optimizer.step();
      optimizer.zero_grad();
    }
    measured_.peak = static_cast<double>(meter_->peak_bytes());
  }

  void count(Operation operation, int64_t bytes) {
    plan::Traffic& traffic = measured_.wire[operation];
    ++traffic.collectives;
    traffic.tensor_bytes += bytes;
  }

  const Case& case_;
  const Group world_;
  MemoryMeter* meter_ = nullptr;
  Measured measured_;
};

/// The plan is of the rank that has the most.
double over_ranks(const Group& world, double value) {
  const at::Tensor most = torch::full({1}, value, at::kDouble);
  world.all_reduce(most, ReduceOp::Max);
  return most.item<double>();
}

void expect_near(const char* what, double planned, double measured) {
  EXPECT_NEAR(planned, measured, kTolerance * measured) << what;
}

void expect_same_traffic(const Plan& plan, const Measured& measured) {
  for (const Operation operation :
       {Operation::GatherForward,
        Operation::GatherBackward,
        Operation::ReduceScatter,
        Operation::AllReduce}) {
    const auto found = measured.wire.find(operation);
    const plan::Traffic real =
        found == measured.wire.end() ? plan::Traffic{} : found->second;
    const plan::Traffic& planned = plan.wire.of(operation);
    EXPECT_EQ(planned.collectives, real.collectives) << name_of(operation);
    EXPECT_EQ(planned.tensor_bytes, real.tensor_bytes) << name_of(operation);
  }
}

class MeasuredPlanTest : public ::testing::TestWithParam<Case> {};

TEST_P(MeasuredPlanTest, IsWithinFivePercentOfARealRun) {
  const Case& one = GetParam();
  on_ranks(static_cast<int>(one.setup.world()), [&](const Group& world) {
    const Plan plan = make_plan(GptSubject{one.shape, one.run}, one.setup);
    Measured measured = TrainingRun(one, world).measure();
    const auto most = [&](double value) { return over_ranks(world, value); };
    expect_near("peak", plan.device.at_peak.total(), most(measured.peak));
    expect_near("rest", plan.at_rest.total(), most(measured.rest));
    expect_near("shards", plan.at_rest.of(Kind::Shards), most(measured.shards));
    expect_near(
        "optimizer",
        plan.at_rest.of(Kind::Optimizer),
        most(measured.optimizer));
    expect_near(
        "gradients",
        plan.after_backward.of(Kind::Gradients),
        most(measured.gradients));
    expect_near(
        "full", plan.device.highest.of(Kind::Full), most(measured.full));
    expect_near(
        "saved",
        plan.after_forward.total() - plan.before_forward.total(),
        most(measured.saved));
    expect_same_traffic(plan, measured);
  });
}

constexpr DType kBf16 = DType::BFloat16;

TrainingSetup sharded(int64_t copies, int64_t shards) {
  return {.copies = copies, .shards = shards, .device = plan::Device::Cpu};
}

TrainingSetup whole(Engine engine, int64_t copies) {
  return {.engine = engine, .copies = copies, .device = plan::Device::Cpu};
}

TrainingSetup with(
    TrainingSetup setup,
    const std::function<void(TrainingSetup&)>& change) {
  change(setup);
  return setup;
}

std::vector<Case> cases() {
  const plan::GptRun few{.batch = 2};
  const plan::GptRun many{.batch = 4};
  const plan::GptRun again{.batch = 4, .recomputes = true};
  const plan::GptRun cast{.batch = 4, .loss_dtype = DType::Float32};
  const plan::GptRun chunks{.batch = 4, .chunks_loss = true};
  const auto keeps = [](TrainingSetup& s) { s.reshard_after_forward = false; };
  const auto bf16 = [](TrainingSetup& s) { s.param_dtype = kBf16; };
  const auto all_bf16 = [](TrainingSetup& s) {
    s.param_dtype = kBf16;
    s.reduce_dtype = kBf16;
  };
  const auto keeps_casts = [](TrainingSetup& s) {
    s.param_dtype = kBf16;
    s.keep_cast_shards = true;
  };
  const auto rows = [](TrainingSetup& s) {
    s.layout = engine::Layout::Kind::Dim0;
  };
  const auto offloads = [](TrainingSetup& s) { s.offload = true; };
  const auto often = [](TrainingSetup& s) { s.accumulate = 4; };
  const auto once = [](TrainingSetup& s) {
    s.accumulate = 4;
    s.syncs_always = false;
  };
  // A block has 1.8 MB.
  const auto overlaps = [](TrainingSetup& s) { s.overlap_bytes = 4'000'000; };
  const auto overlaps_once = [](TrainingSetup& s) {
    s.accumulate = 4;
    s.syncs_always = false;
    s.overlap_bytes = 4'000'000;
  };
  const auto stored_bf16 = [](TrainingSetup& s) { s.dtype = kBf16; };
  return {
      {"FullShard1Wide", kWide, few, sharded(1, 1)},
      {"FullShard1Long", kLong, many, sharded(1, 1)},
      {"FullShard2Wide", kWide, few, sharded(1, 2)},
      {"FullShard2Long", kLong, many, sharded(1, 2)},
      {"FullShard4Wide", kWide, few, sharded(1, 4)},
      {"FullShard4Long", kLong, many, sharded(1, 4)},
      {"FullShard2Deep", kDeep, many, sharded(1, 2)},
      {"Recompute2Deep", kDeep, again, sharded(1, 2)},
      {"Bf16On2Deep", kDeep, many, with(sharded(1, 2), bf16)},
      {"Ddp2Deep", kDeep, many, whole(Engine::Ddp, 2)},
      {"ShardGradOp2Wide", kWide, few, with(sharded(1, 2), keeps)},
      {"ShardGradOp4Long", kLong, many, with(sharded(1, 4), keeps)},
      {"Bf16On1Long", kLong, cast, with(sharded(1, 1), bf16)},
      {"Bf16On2Wide", kWide, few, with(sharded(1, 2), bf16)},
      {"Bf16On2Long", kLong, cast, with(sharded(1, 2), bf16)},
      {"KeptCasts1Long", kLong, cast, with(sharded(1, 1), keeps_casts)},
      {"KeptCasts2Wide", kWide, few, with(sharded(1, 2), keeps_casts)},
      {"Bf16ReducedOn4Wide", kWide, few, with(sharded(1, 4), all_bf16)},
      {"Recompute1Long", kLong, again, sharded(1, 1)},
      {"Recompute2Wide", kWide, again, sharded(1, 2)},
      {"Recompute4Long", kLong, again, sharded(1, 4)},
      {"Split1Wide", split(kWide), few, sharded(1, 1)},
      {"Split2Wide", split(kWide), few, sharded(1, 2)},
      {"Split4Wide", split(kWide), few, sharded(1, 4)},
      {"SplitKeeps2Wide", split(kWide), few, with(sharded(1, 2), keeps)},
      {"SplitBf16On2Wide", split(kWide), few, with(sharded(1, 2), bf16)},
      {"SplitUnsynced2Wide", split(kWide), few, with(sharded(1, 2), once)},
      {"Overlap2Wide", kWide, few, with(sharded(1, 2), overlaps)},
      {"Overlap4Deep", kDeep, many, with(sharded(1, 4), overlaps)},
      {"OverlapRecompute2Deep", kDeep, again, with(sharded(1, 2), overlaps)},
      {"OverlapHybrid2x2Wide", kWide, few, with(sharded(2, 2), overlaps)},
      {"OverlapSplit2Wide", split(kWide), few, with(sharded(1, 2), overlaps)},
      {"OverlapSplitUnsynced2Wide",
       split(kWide),
       few,
       with(sharded(1, 2), overlaps_once)},
      {"Chunked1Long", kLong, chunks, sharded(1, 1)},
      {"Chunked2Long", kLong, chunks, sharded(1, 2)},
      {"Chunked2Wide", kWide, chunks, sharded(1, 2)},
      {"ChunkedBf16On2Long", kLong, chunks, with(sharded(1, 2), bf16)},
      {"ChunkedSplit2Wide", split(kWide), chunks, sharded(1, 2)},
      {"ChunkedUnsynced2Long", kLong, chunks, with(sharded(1, 2), once)},
      {"ChunkedDdp2Long", kLong, chunks, whole(Engine::Ddp, 2)},
      {"NoShard2Wide", kWide, few, sharded(2, 1)},
      {"Hybrid2x2Wide", kWide, few, sharded(2, 2)},
      {"Rows2Wide", kWide, few, with(sharded(1, 2), rows)},
      {"Offload2Wide", kWide, few, with(sharded(1, 2), offloads)},
      {"Accumulate2Wide", kWide, few, with(sharded(1, 2), often)},
      {"AccumulateUnsynced2Wide", kWide, few, with(sharded(1, 2), once)},
      {"Ddp1Wide", kWide, few, whole(Engine::Ddp, 1)},
      {"Ddp2Wide", kWide, few, whole(Engine::Ddp, 2)},
      {"Ddp2Long", kLong, again, whole(Engine::Ddp, 2)},
      {"Ddp2Bf16Long", kLong, cast, with(whole(Engine::Ddp, 2), stored_bf16)},
      {"DdpUnsynced2Wide", kWide, few, with(whole(Engine::Ddp, 2), once)},
      {"Zero2Wide", kWide, few, whole(Engine::Zero, 2)},
      {"Zero4Long", kLong, many, whole(Engine::Zero, 4)},
  };
}

INSTANTIATE_TEST_SUITE_P(
    Setups,
    MeasuredPlanTest,
    ::testing::ValuesIn(cases()),
    [](const auto& test) { return std::string(test.param.name); });

} // namespace
} // namespace tessera
