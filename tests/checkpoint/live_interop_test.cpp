// Checkpoints exchanged with a live Python: Python reads all of ours, and a run
// that moves from one to the other continues as it would have without moving.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adam.h>
#include <tessera/train/training_state.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "checkpoint/disk/python.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/support.h"
#include "checkpoint/values.h"
#include "support/ranks.h"

namespace tessera {
namespace {

using checkpoint::python_with_torch;
using checkpoint::run_python;
using testing::Cut;
using testing::cut;
using testing::on_ranks;
using testing::RanksOptions;
using testing::TempFolder;

/// Python takes its time to start.
RanksOptions patient(int size) {
  return {
      .size = size,
      .timeout = std::chrono::milliseconds(200000),
      .test_timeout = std::chrono::milliseconds(250000)};
}

/// Runs live_interop.py on rank 0, while the others wait.
void python(const Group& world, const std::vector<std::string>& words) {
  if (world.rank() == 0) {
    const auto outcome =
        run_python(python_with_torch(), TESSERA_LIVE_INTEROP, words);
    EXPECT_EQ(outcome.status, 0) << outcome.output;
  }
  world.barrier();
}

std::string raw_bytes(const at::Tensor& tensor) {
  const at::Tensor data = tensor.contiguous();
  return {static_cast<const char*>(data.const_data_ptr()), data.nbytes()};
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<uint8_t>(byte));
    text += digits;
  }
  return text;
}

struct WrittenTensor {
  const char* name;
  at::Tensor whole;
};

std::vector<WrittenTensor> tensors_of_every_kind() {
  torch::manual_seed(4);
  const at::Tensor values = torch::randint(0, 100, {6, 4});
  std::vector<WrittenTensor> result;
  for (const auto dtype :
       {at::kBool,
        at::kByte,
        at::kChar,
        at::kShort,
        at::kInt,
        at::kLong,
        at::kHalf,
        at::kBFloat16,
        at::kFloat,
        at::kDouble,
        at::kComplexFloat}) {
    result.push_back({c10::toString(dtype), values.to(dtype)});
  }
  result.push_back({"scalar", torch::tensor(2.5)});
  result.push_back({"empty", torch::zeros({0, 3})});
  result.push_back({"no rows.odd/name \xc3\xa9", torch::randn({5})});
  return result;
}

TEST(LiveInteropTest, PythonReadsEveryKindOfTensorAndValue) {
  if (python_with_torch().empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  on_ranks(patient(3), [](const Group& world) {
    const TempFolder folder(world);
    for (const Cut how : {Cut::Whole, Cut::Rows, Cut::Flat}) {
      StateDict tensors;
      for (const WrittenTensor& tensor : tensors_of_every_kind()) {
        tensors.set(tensor.name, cut(tensor.whole, how, world));
      }
      const StateDict state{
          {"t", tensors},
          {"step", 7},
          {"lr", 0.5},
          {"on", true},
          {"none", nullptr},
          {"text", "h\xc3\xa9llo"},
          {"list", StateList{1, "two", StateList{3}}},
          {"groups", StateList{StateDict{{"lr", 0.25}}}}};
      const std::string name = std::to_string(static_cast<int>(how));
      checkpoint::save(state, folder / name);
      const auto out = folder / (name + "_out");
      if (world.rank() == 0) {
        testing::fs::create_directory(out);
      }
      python(world, {"dump", folder / name, out});
      const auto rows =
          nlohmann::json::parse(testing::read_bytes(out / "rows.json"));
      std::map<std::string, nlohmann::json> by_path;
      for (const auto& row : rows) {
        std::string path;
        for (const auto& key : row[0]) {
          path += "/" + (key.is_string() ? key.get<std::string>() : key.dump());
        }
        by_path[path] = row;
      }
      for (const WrittenTensor& tensor : tensors_of_every_kind()) {
        SCOPED_TRACE(tensor.name);
        const auto row = by_path.at("/t/" + std::string(tensor.name));
        EXPECT_EQ(
            row[1],
            format::info(*checkpoint::to_format(tensor.whole.scalar_type()))
                .torch_name);
        EXPECT_EQ(
            row[2].get<std::vector<int64_t>>(), tensor.whole.sizes().vec());
        EXPECT_EQ(
            testing::read_bytes(out / row[3].get<std::string>()),
            raw_bytes(tensor.whole));
      }
      EXPECT_EQ(by_path.at("/step")[2], 7);
      EXPECT_EQ(by_path.at("/lr")[2], 0.5);
      EXPECT_EQ(by_path.at("/on")[2], true);
      EXPECT_TRUE(by_path.at("/none")[2].is_null());
      EXPECT_EQ(by_path.at("/text")[2], "h\xc3\xa9llo");
      EXPECT_EQ(by_path.at("/list")[2].dump(), "[1,\"two\",[3]]");
      EXPECT_EQ(by_path.at("/groups/0/lr")[2], 0.25);
    }
  });
}

/// The run of live_interop.py.
struct Trial {
  Trial(const Group& world, ShardLayout layout) {
    torch::manual_seed(1);
    model = torch::nn::Sequential(
        torch::nn::Linear(5, 7),
        torch::nn::Tanh(),
        torch::nn::Linear(7, 3),
        torch::nn::Linear(3, 2));
    const auto options = FullyShardOptions().group(world).layout(layout);
    fully_shard(*model->ptr(0), options);
    fully_shard(*model->ptr(2), options);
    fully_shard(*model, options);
    optimizer = std::make_unique<optim::Adam>(parameters(*model), 0.05);
    training =
        std::make_unique<TrainingState>(*model, OptimizerRefs{*optimizer});
  }

  void step() {
    optimizer->zero_grad();
    const at::Tensor input =
        torch::arange(30, torch::kFloat).reshape({6, 5}) / 10 - 1.5;
    model->forward(input).square().mean().backward();
    optimizer->step();
  }

  /// Without the generators, which Python's checkpoint does not have.
  StateDict state() {
    auto state = get_state_dict(*model, {*optimizer});
    return {{"model", state.model}, {"optim", state.optimizer}};
  }

  /// Where this run and a checkpoint differ beyond rounding.
  std::string difference(const testing::fs::path& path) {
    StateDict other = state().clone();
    checkpoint::load(other, path);
    return diff_state_dicts(state(), other, {.rtol = 1e-5, .atol = 1e-7});
  }

  torch::nn::Sequential model{nullptr};
  std::unique_ptr<optim::Adam> optimizer;
  std::unique_ptr<TrainingState> training;
};

TEST(LiveInteropTest, PythonGoesOnWhereWeStopped) {
  if (python_with_torch().empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  on_ranks(patient(3), [](const Group& world) {
    const TempFolder folder(world);
    Trial run(world, ShardLayout::Flat);
    run.step();
    run.step();
    checkpoint::save(run.state(), folder / "ours");
    python(world, {"resume", folder / "ours", folder / "theirs"});
    EXPECT_NE(run.difference(folder / "theirs"), ""); // it continued
    run.step();
    EXPECT_EQ(run.difference(folder / "theirs"), "");
  });
}

TEST(LiveInteropTest, WeGoOnWherePythonStopped) {
  if (python_with_torch().empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  on_ranks(patient(3), [](const Group& world) {
    const TempFolder folder(world);
    python(world, {"train", folder / "theirs", folder / "next"});
    for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      Trial run(world, layout);
      // Python's has no generators, and values are ours.
      checkpoint::load(
          *run.training,
          folder / "theirs",
          checkpoint::LoadOptions().optional([](const std::string& name) {
            return name.rfind("values", 0) == 0;
          }));
      EXPECT_EQ(run.difference(folder / "theirs"), "");
      run.step();
      EXPECT_EQ(run.difference(folder / "next"), "");
    }
  });
}

/// A part that is not asked for is not opened.
TEST(LiveInteropTest, ObjectsOfPythonInOtherPartsDoNotMatter) {
  if (python_with_torch().empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  on_ranks(patient(2), [](const Group& world) {
    const TempFolder folder(world);
    python(world, {"objects", folder / "c", "words"});
    StateDict target{{"model", StateDict{{"weight", torch::zeros({6})}}}};
    checkpoint::load(target, folder / "c");
    EXPECT_TRUE(torch::equal(
        target.at("model").dict().at("weight").tensor(), torch::arange(6.0)));
  });
}

TEST(LiveInteropTest, EveryCutLoadsTheWeightsOfAnExportedProgram) {
  if (python_with_torch().empty()) {
    GTEST_SKIP() << "this LibTorch came without Python";
  }
  on_ranks(patient(3), [](const Group& world) {
    const TempFolder folder(world);
    if (world.rank() == 0) {
      const auto outcome = run_python(
          python_with_torch(), TESSERA_MAKE_ARCHIVES, {folder.path()});
      EXPECT_EQ(outcome.status, 0) << outcome.output;
    }
    world.barrier();
    const StateDict whole = checkpoint::read(folder / "model.pt2");
    const auto expected =
        nlohmann::json::parse(testing::read_bytes(folder / "model.json"));
    EXPECT_EQ(whole.size(), 23);
    for (const auto& [key, value] : whole) {
      const std::string& name = key.name();
      EXPECT_EQ(
          hex(raw_bytes(value.tensor())),
          expected[name]["bytes"].get<std::string>())
          << name;
    }
    for (const Cut how : {Cut::Whole, Cut::Rows, Cut::Columns, Cut::Flat}) {
      StateDict wanted;
      StateDict target;
      for (const auto& [name, value] : whole) {
        const StateValue part = cut(value.tensor(), how, world);
        wanted.set(name, part);
        target.set(name, testing::blank(part));
      }
      checkpoint::load(target, folder / "model.pt2");
      EXPECT_EQ(diff_state_dicts(target, wanted), "");
    }
  });
}

} // namespace
} // namespace tessera
