// Saving in the background: the checkpoint has the state at the moment of the
// call.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/fsdp.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/transfer/distributed_state_dict.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>

#include "checkpoint/disk/files.h"
#include "checkpoint/support.h"
#include "libtorch/compat.h"
#include "support/command.h"
#include "support/device.h"
#include "support/errors.h"
#include "support/ranks.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using checkpoint::FileOp;
using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

torch::nn::Sequential make_model() {
  torch::manual_seed(3);
  torch::nn::Sequential model(
      torch::nn::Linear(64, 128),
      torch::nn::ReLU(),
      torch::nn::Linear(128, 64),
      torch::nn::BatchNorm1d(64));
  model->to(test_device());
  return model;
}

void train(
    torch::nn::Sequential& model,
    torch::optim::Optimizer& optimizer,
    int steps) {
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    model->forward(torch::randn({8, 64}).to(test_device()))
        .square()
        .mean()
        .backward();
    optimizer.step();
  }
}

/// LibTorch before 2.13 cannot hold memory that is about to be written to; see
/// [Note: copies when they must be].
constexpr bool kHoldsMemory = TESSERA_TORCH_AT_LEAST(2, 13);

/// Writing a file waits until the gate is opened.
class Gate {
 public:
  Gate() {
    checkpoint::set_file_fault([this](FileOp op, const fs::path&) {
      if (op == FileOp::Create) {
        is_open_.wait(false);
      }
      return 0;
    });
  }
  ~Gate() {
    checkpoint::set_file_fault({});
  }
  void open() {
    is_open_ = true;
    is_open_.notify_all();
  }

 private:
  std::atomic<bool> is_open_{false};
};

enum class Way { Plain, Flat, Dim0, NoShard };

template <class Optimizer>
void check_snapshot(const Group& world, Way way) {
  SCOPED_TRACE(static_cast<int>(way));
  const TempFolder folder(world);
  torch::nn::Sequential model = make_model();
  if (way == Way::NoShard) {
    FSDP(model, FSDPOptions().sharding_strategy(ShardingStrategy::NoShard));
  } else if (way != Way::Plain) {
    fully_shard(
        *model,
        FullyShardOptions().layout(
            way == Way::Flat ? ShardLayout::Flat : ShardLayout::Dim0));
  }
  Optimizer optimizer(
      way == Way::Plain ? model->parameters() : parameters(*model), 0.05);
  torch::manual_seed(11); // the same input on all ranks
  train(model, optimizer, 2);

  const auto state_now = [&] {
    auto state = get_state_dict(*model, {optimizer});
    return StateDict{
        {"model", state.model}, {"optim", state.optimizer}, {"step", 2}};
  };
  const StateDict expected = state_now().clone();
  auto saving = checkpoint::async_save(state_now(), folder / "c");
  if (test_device().is_cpu() && kHoldsMemory) {
    EXPECT_EQ(saving.staged_bytes(), 0);
  }
  train(model, optimizer, 3); // changes all of it
  EXPECT_NE(diff_state_dicts(state_now(), expected), "");
  saving.wait();
  EXPECT_TRUE(saving.done());
  saving.wait(); // again is fine

  StateDict loaded = state_now().clone();
  checkpoint::load(loaded, folder / "c");
  EXPECT_EQ(diff_state_dicts(loaded, expected), "");
  train(model, optimizer, 1); // and training continues
}

TEST(AsyncSaveTest, IsTheStateOfTheMoment) {
  on_ranks(2, [](const Group& world) {
    for (const Way way : {Way::Plain, Way::Flat, Way::Dim0, Way::NoShard}) {
      check_snapshot<optim::AdamW>(world, way);
      check_snapshot<torch::optim::AdamW>(world, way);
    }
  });
}

TEST(AsyncSaveTest, OverGloo) {
  on_ranks({.size = 2, .backend = "gloo"}, [](const Group& world) {
    check_snapshot<optim::AdamW>(world, Way::Flat);
  });
}

TEST(AsyncSaveTest, MemoryThatIsNotLibTorchsIsCopiedAtOnce) {
  const TempFolder folder;
  std::vector<float> memory(1000, 1);
  const at::Tensor view = torch::from_blob(memory.data(), {1000});
  auto saving = checkpoint::async_save({{"a", view}}, folder / "c");
  EXPECT_EQ(saving.staged_bytes(), 4000);
  view.fill_(2);
  saving.wait();
  EXPECT_EQ(
      checkpoint::read(folder / "c").at("a").tensor().sum().item<float>(),
      1000);
}

TEST(AsyncSaveTest, ViewsOfOneStorageStayViews) {
  const TempFolder folder;
  const at::Tensor base = torch::arange(100);
  const at::Tensor part = base.slice(0, 10, 20);
  auto saving =
      checkpoint::async_save({{"base", base}, {"part", part}}, folder / "c");
  part.fill_(-1);
  EXPECT_EQ(base[10].item<int64_t>(), -1); // still one memory
  saving.wait();
  const StateDict read = checkpoint::read(folder / "c");
  EXPECT_TRUE(torch::equal(read.at("base").tensor(), torch::arange(100)));
  EXPECT_TRUE(torch::equal(read.at("part").tensor(), torch::arange(10, 20)));
}

/// Threads that write to parts of one storage which a save has shared.
TEST(AsyncSaveTest, LoadsWithThreadsWhileASaveIsUnderWay) {
  const TempFolder folder;
  const at::Tensor base = torch::arange(64 * 5000);
  StateDict state;
  for (int i = 0; i < 64; ++i) {
    state.set("t" + std::to_string(i), base.slice(0, i * 5000, (i + 1) * 5000));
  }
  checkpoint::save(state, folder / "first");
  for (int round = 0; round < 30; ++round) {
    auto saving = checkpoint::async_save(
        state, folder / "c", checkpoint::SaveOptions().overwrite(true));
    base.fill_(-1);
    checkpoint::load(
        state, folder / "first", checkpoint::LoadOptions().threads(4));
    ASSERT_TRUE(torch::equal(base, torch::arange(64 * 5000)));
    saving.wait();
  }
  EXPECT_TRUE(torch::equal(
      checkpoint::read(folder / "c").at("t63").tensor(),
      base.slice(0, 315000)));
}

TEST(AsyncSaveTest, NothingIsCopiedOnceItIsOnDisk) {
  const TempFolder folder;
  const at::Tensor value = torch::ones({1000});
  const void* before = value.const_data_ptr();
  auto saving = checkpoint::async_save({{"v", value}}, folder / "c");
  saving.wait();
  EXPECT_EQ(value.const_data_ptr(), before);
  value.add_(1);
  EXPECT_EQ(value.const_data_ptr(), before);
}

TEST(AsyncSaveTest, WhatIsWrittenToWhileItIsSavedGetsOtherMemory) {
  const TempFolder folder;
  Gate gate;
  const at::Tensor value = torch::ones({1000});
  const void* before = value.const_data_ptr();
  auto saving = checkpoint::async_save({{"v", value}}, folder / "c");
  EXPECT_EQ(value.sum().item<float>(), 1000); // reading copies nothing
  EXPECT_EQ(value.const_data_ptr(), before);
  value.add_(1);
  EXPECT_EQ(value.sum().item<float>(), 2000);
  if (kHoldsMemory) {
    EXPECT_NE(value.const_data_ptr(), before);
  }
  gate.open();
  saving.wait();
  EXPECT_EQ(
      checkpoint::read(folder / "c").at("v").tensor().sum().item<float>(),
      1000);
}

TEST(AsyncSaveTest, TensorsMayGoOrGrowWhileTheyAreSaved) {
  const TempFolder folder;
  Gate gate;
  std::optional<at::Tensor> gone = torch::full({1000}, 3.0);
  const at::Tensor grown = torch::full({1000}, 5.0);
  auto saving =
      checkpoint::async_save({{"gone", *gone}, {"grown", grown}}, folder / "c");
  std::thread([&] { gone.reset(); }).join();
  const at::Tensor other = torch::full({1000}, 7.0); // where it was, if freed
  grown.resize_({2000}).fill_(9);
  gate.open();
  saving.wait();
  EXPECT_EQ(grown.sum().item<float>(), 18000);
  const StateDict read = checkpoint::read(folder / "c");
  EXPECT_TRUE(torch::equal(read.at("gone").tensor(), torch::full({1000}, 3.0)));
  EXPECT_TRUE(
      torch::equal(read.at("grown").tensor(), torch::full({1000}, 5.0)));
}

TEST(AsyncSaveTest, ALazyCloneIsCopiedAtOnce) {
  const TempFolder folder;
  const at::Tensor value = torch::ones({1000});
  const at::Tensor clone = at::_lazy_clone(value);
  auto saving = checkpoint::async_save({{"v", value}}, folder / "c");
  EXPECT_EQ(saving.staged_bytes(), 4000);
  value.fill_(2);
  saving.wait();
  EXPECT_EQ(clone.sum().item<float>(), 1000);
  EXPECT_EQ(
      checkpoint::read(folder / "c").at("v").tensor().sum().item<float>(),
      1000);
}

/// LibTorch's copy-on-write gives up its reference before it takes its lock:
/// a thread that comes in between frees the lock. See async_soak.cpp.
TEST(AsyncSaveTest, SurvivesLocksThatComeLate) {
  const TempFolder folder;
  const auto result = testing::run_command(
      {testing::bin_dir() + "/async_soak",
       folder.path().string(),
       "2",
       "late-locks"},
      {.environment = testing::without_launcher(),
       .timeout =
           std::chrono::seconds(240)}); // every lock is late, not ours alone
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("all as they were"));
}

TEST(AsyncSaveTest, SeveralAtOnce) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    const at::Tensor value = torch::zeros({1000});
    std::vector<checkpoint::AsyncSave> saves;
    for (int i = 0; i < 4; ++i) {
      value.fill_(i);
      saves.push_back(
          checkpoint::async_save({{"v", value}}, folder / std::to_string(i)));
    }
    for (auto& save : saves) {
      save.wait();
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(
          checkpoint::read(folder / std::to_string(i))
              .at("v")
              .tensor()[7]
              .item<float>(),
          i);
    }
  });
}

TEST(AsyncSaveTest, ErrorsOfTheCallComeAtOnce) {
  on_ranks(2, [](const Group& world) {
    const TempFolder folder(world);
    EXPECT_THAT(
        error_of([&] {
          const auto save =
              checkpoint::async_save({{"loss", world.rank()}}, folder / "c");
        }),
        HasSubstr("different values"));
    EXPECT_THAT(names_in(folder.path()), IsEmpty());
  });
}

TEST(AsyncSaveTest, ErrorsOfTheWritingComeOnEveryRankFromWait) {
  on_ranks(3, [](const Group& world) {
    const TempFolder folder(world);
    if (world.rank() == 1) {
      checkpoint::set_file_fault([](FileOp op, const fs::path&) {
        return op == FileOp::Sync ? EIO : 0;
      });
    }
    auto save = checkpoint::async_save(
        {{"v", testing::cut(torch::randn({30, 3}), testing::Cut::Rows, world)}},
        folder / "c");
    const std::string error = error_of([&] { save.wait(); });
    checkpoint::set_file_fault({});
    EXPECT_THAT(
        error,
        AllOf(
            HasSubstr("rank 1"),
            HasSubstr("__1_0.distcp"),
            HasSubstr("Input/output error")));
    world.barrier();
    EXPECT_THAT(names_in(folder.path()), IsEmpty());
  });
}

} // namespace
} // namespace tessera
