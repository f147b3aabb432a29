// A run that is saved and resumed elsewhere.
#include <tessera/checkpoint/manager.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/sgd.h>
#include <tessera/train/training_state.h>
#include <tessera/zero/zero_redundancy_optimizer.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "checkpoint/support.h"
#include "support/device.h"
#include "support/errors.h"
#include "support/memory_meter.h"
#include "support/ranks.h"
#include "zero/support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::on_ranks;
using testing::TempFolder;
using testing::test_device;

constexpr double kMegaByte = 1 << 20;

/// With dropout, so that losses depend on the generators.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 12));
    norm = register_module("norm", torch::nn::BatchNorm1d(12));
    second = register_module("second", torch::nn::Linear(12, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(
        torch::dropout(torch::relu(norm(first(x))), 0.3, is_training()));
  }
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear second{nullptr};
};
TORCH_MODULE(Net);

template <class Optimizer>
struct ResumedTrial {
  ResumedTrial(bool sharded, uint64_t seed, const Group& group) {
    torch::manual_seed(seed);
    net = Net();
    net->to(test_device());
    if (sharded) {
      const auto options = FullyShardOptions().group(group);
      fully_shard(*net->first, options);
      fully_shard(*net, options);
    }
    optimizer = std::make_unique<Optimizer>(
        sharded ? parameters(*net) : net->parameters(), 0.05);
    training = std::make_unique<TrainingState>(*net, OptimizerRefs{*optimizer});
    training->values = {{"step", 0}, {"note", ""}};
    torch::manual_seed(seed + 100 + static_cast<uint64_t>(group.rank()));
  }

  /// Losses of the next steps, on data of this step and rank.
  std::vector<float> steps(int count) {
    std::vector<float> losses;
    int64_t step = training->values.at("step").to_int();
    for (int i = 0; i < count; ++i) {
      optimizer->zero_grad();
      const at::Tensor input = torch::randn({8, 6}).to(test_device());
      const at::Tensor loss = net->forward(input).square().mean();
      loss.backward();
      optimizer->step();
      losses.push_back(loss.template item<float>());
      training->values.set("step", ++step);
    }
    return losses;
  }

  Net net{nullptr};
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<TrainingState> training;
};

/// Sharded over all ranks, or each rank a run of its own.
template <class Optimizer>
void check_resume(const Group& world, bool sharded) {
  const Group group = sharded ? world : world.alone();
  const auto saved = checkpoint::SaveOptions().group(group);
  const auto loaded = checkpoint::LoadOptions().group(group);
  const TempFolder folder(group);
  ResumedTrial<Optimizer> run(sharded, 1, world);
  run.steps(3);
  static_cast<torch::optim::Optimizer&>(*run.optimizer)
      .param_groups()[0]
      .options()
      .set_lr(0.025); // a schedule
  run.training->values.set("note", "half way");
  checkpoint::save(*run.training, folder / "c", saved);
  const std::vector<float> expected = run.steps(3);

  ResumedTrial<Optimizer> other(sharded, 2, world);
  checkpoint::load(*other.training, folder / "c", loaded);
  EXPECT_EQ(other.training->values.at("step").to_int(), 3);
  EXPECT_EQ(other.training->values.at("note").string(), "half way");
  EXPECT_EQ(
      static_cast<torch::optim::Optimizer&>(*other.optimizer)
          .param_groups()[0]
          .options()
          .get_lr(),
      0.025);
  EXPECT_EQ(other.steps(3), expected); // bit by bit
}

TEST(TrainingStateTest, GoesOnBitByBit) {
  on_ranks(2, [](const Group& world) {
    for (const bool sharded : {false, true}) {
      SCOPED_TRACE(sharded);
      check_resume<optim::AdamW>(world, sharded);
      check_resume<torch::optim::Adam>(world, sharded);
      check_resume<optim::SGD>(world, sharded);
    }
  });
}

TEST(TrainingStateTest, GoesOnWithAnotherNumberOfRanksOrNone) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    const auto pair = world.subgroup({0, 1});
    if (pair) {
      ResumedTrial<optim::AdamW> run(true, 1, *pair);
      run.steps(2);
      checkpoint::save(
          *run.training, folder / "c", checkpoint::SaveOptions().group(*pair));
    }
    world.barrier();
    ResumedTrial<optim::AdamW> wide(true, 7, world);
    checkpoint::load(*wide.training, folder / "c");
    EXPECT_EQ(wide.training->values.at("step").to_int(), 2);
    checkpoint::save(*wide.training, folder / "wide");

    ResumedTrial<torch::optim::AdamW> plain(false, 8, world.alone());
    checkpoint::load(
        *plain.training,
        folder / "wide",
        checkpoint::LoadOptions().group(world.alone()));
    const StateDict expected = checkpoint::read(
        folder / "c",
        [](const std::string& name) { return name.rfind("model.", 0) == 0; });
    EXPECT_EQ(
        diff_state_dicts(
            get_model_state_dict(*plain.net), expected.at("model").dict()),
        "");
    const StateDict wide_state = get_model_state_dict(
        *wide.net, StateDictOptions().full_state_dict(true));
    EXPECT_EQ(diff_state_dicts(wide_state, expected.at("model").dict()), "");
  });
}

TEST(TrainingStateTest, ThroughAManagerAndAsync) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    checkpoint::Manager manager(folder / "c");
    std::vector<float> expected;
    {
      ResumedTrial<optim::AdamW> run(true, 1, world);
      EXPECT_EQ(manager.load_latest(*run.training), std::nullopt);
      run.steps(2);
      manager.async_save(2, *run.training);
      run.steps(2);
      manager.async_save(4, *run.training);
      expected = run.steps(3);
      manager.wait();
    }
    ResumedTrial<optim::AdamW> run(true, 5, world);
    EXPECT_EQ(manager.load_latest(*run.training), 4);
    EXPECT_EQ(run.steps(3), expected);
  });
}

// ---- An optimizer that ranks share
// -------------------------------------------

struct SharedTrial {
  SharedTrial(const Group& group, uint64_t seed) {
    torch::manual_seed(seed);
    net = Net();
    zero = std::make_unique<ZeroRedundancyOptimizer>(
        net->parameters(),
        optimizer_class<optim::AdamW>(0.05),
        ZeroOptions().process_group(group));
    training = std::make_unique<TrainingState>(*net, OptimizerRefs{*zero});
  }

  /// The same inputs on all ranks, so that gradients need no averaging.
  void steps(int begin, int end) {
    for (int i = begin; i < end; ++i) {
      torch::manual_seed(1000 + i);
      zero->zero_grad();
      net->forward(torch::randn({8, 6})).square().mean().backward();
      zero->step();
    }
  }

  /// Model, and the optimizer as it is when consolidated. Collective.
  StateDict all() {
    const auto state =
        get_state_dict(*net, {*zero}, StateDictOptions().full_state_dict(true));
    return {{"model", state.model}, {"optim", state.optimizer}};
  }

  Net net{nullptr};
  std::unique_ptr<ZeroRedundancyOptimizer> zero;
  std::unique_ptr<TrainingState> training;
};

TEST(TrainingStateTest, ASharedOptimizerIsSavedFromWhereItLies) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    SharedTrial run(world, 1);
    run.steps(0, 3);
    checkpoint::save(*run.training, folder / "c");
    const StateDict saved = run.all().clone(); // the model goes on

    // The files hold what is consolidated.
    const StateDict read =
        checkpoint::read(folder / "c", [](const std::string& name) {
          return name.rfind("model.", 0) == 0 || name.rfind("optim.", 0) == 0;
        });
    EXPECT_EQ(diff_state_dicts(read, saved), "");

    SharedTrial again(world, 2);
    checkpoint::load(*again.training, folder / "c");
    EXPECT_EQ(diff_state_dicts(again.all(), saved), "");

    // Two ranks, and one without ZeRO; asynchronously, while the next steps
    // run.
    const auto pair = world.split(world.rank() % 2);
    SharedTrial narrow(*pair, 3);
    checkpoint::load(
        *narrow.training, folder / "c", checkpoint::LoadOptions().group(*pair));
    EXPECT_EQ(diff_state_dicts(narrow.all(), saved), "");
    Net net;
    optim::AdamW optimizer(net->parameters(), 0.5);
    TrainingState plain(*net, {optimizer});
    checkpoint::load(
        plain, folder / "c", checkpoint::LoadOptions().group(world.alone()));
    const auto state = get_state_dict(*net, {optimizer});
    EXPECT_EQ(
        diff_state_dicts(
            {{"model", state.model}, {"optim", state.optimizer}}, saved),
        "");

    // And back, with the steps that follow.
    if (world.rank() == 0) {
      checkpoint::save(
          plain,
          folder / "plain",
          checkpoint::SaveOptions().group(world.alone()));
    }
    world.barrier();
    SharedTrial wide(world, 4);
    checkpoint::load(*wide.training, folder / "plain");
    auto saving = checkpoint::async_save(*run.training, folder / "async");
    run.steps(3, 5);
    saving.wait();
    wide.steps(3, 5);
    EXPECT_EQ(diff_state_dicts(wide.all(), run.all()), "");
    SharedTrial last(world, 5);
    checkpoint::load(*last.training, folder / "async");
    EXPECT_EQ(diff_state_dicts(last.all(), saved), "");
  });
}

TEST(TrainingStateTest, ASharedOptimizerIsSavedInItsOwnMemory) {
  on_ranks(4, [](const Group& world) {
    const TempFolder folder(world);
    testing::SteppedZero subject(8);
    auto& [model, zero] = subject;
    TrainingState training(*model, {zero});
    // The optimizer's state is 64 MB; each rank keeps 16 MB.
    testing::MemoryMeter meter;
    checkpoint::save(training, folder / "c");
    EXPECT_LE(static_cast<double>(meter.peak_bytes()), 4 * kMegaByte);
    meter.reset_peak();
    checkpoint::load(training, folder / "c"); // sets a copy of its part
    EXPECT_LE(static_cast<double>(meter.peak_bytes()), 36 * kMegaByte);
  });
}

/// A checkpoint is read into the state that the optimizer has.
TEST(TrainingStateTest, LoadingNeedsNoSecondCopyOfTheOptimizersState) {
  on_ranks(2, [](const Group& world) {
    for (const bool is_sharded : {true, false}) {
      for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
        const TempFolder folder(world);
        torch::manual_seed(1);
        // 9 MB: neither rows nor elements divide evenly.
        torch::nn::Linear model(1499, 1501);
        if (is_sharded) {
          fully_shard(model, FullyShardOptions().layout(layout));
        }
        optim::AdamW optimizer(
            is_sharded ? parameters(model) : model->parameters(), 0.1);
        const auto step = [&] {
          optimizer.zero_grad();
          model->forward(torch::ones({2, 1499})).square().mean().backward();
          optimizer.step();
        };
        step();
        TrainingState training(model, {optimizer});
        checkpoint::save(training, folder / "c");
        const StateDict saved = training.state_dict().clone();
        step();
        optimizer.zero_grad();
        EXPECT_NE(diff_state_dicts(training.state_dict(), saved), "");
        const testing::MemoryMeter meter;
        checkpoint::load(training, folder / "c");
        EXPECT_LE(static_cast<double>(meter.peak_bytes()), 4 * kMegaByte);
        EXPECT_EQ(diff_state_dicts(training.state_dict(), saved), "");
      }
    }
  });
}

} // namespace
} // namespace tessera
