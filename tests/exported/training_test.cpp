// Exported models, trained on several ranks as Python trains them on one.
#include <tessera/engine/parameters.h>
#include <tessera/exported/units.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/optim/adamw.h>
#include <tessera/transfer/model_state.h>
#include <tessera/transfer/state_dict_type.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exported/cases.h"

namespace tessera {
namespace {

using testing::exported_case;
using testing::loss_of;
using testing::on_ranks;
using testing::Reference;

struct Trial {
  const char* name;
  std::vector<std::string> units; // paths
  int size;
  ShardLayout layout;
  const char* recomputed = ""; // paths
};

void expect_near(const at::Tensor& found, const at::Tensor& wanted) {
  EXPECT_LT(
      (found.to(torch::kDouble) - wanted.to(torch::kDouble))
          .abs()
          .max()
          .item<double>(),
      1e-9);
}

class ExportedTrainingTest : public testing::ExportedCases,
                             public ::testing::WithParamInterface<Trial> {};

TEST_P(ExportedTrainingTest, FiveStepsOfAdamWProducePyTorchValues) {
  const Trial& trial = GetParam();
  const Reference reference(std::string(trial.name) + "_steps");
  on_ranks(trial.size, [&](const Group&) {
    torch::set_num_threads(1);
    auto model =
        load_exported(exported_case(std::string(trial.name) + "_steps"));
    if (*trial.recomputed != '\0') {
      apply_activation_checkpointing(model, choose_by_path(trial.recomputed));
    }
    const auto options = FullyShardOptions().layout(trial.layout);
    for (const std::string& path : trial.units) {
      fully_shard(model->module_at(path), options);
    }
    fully_shard(model, options);
    optim::AdamW optimizer(
        parameters(model), optim::AdamWOptions(1e-2).weight_decay(0.1));
    for (int64_t step = 0; step < 5; ++step) {
      const at::Tensor loss = loss_of(model->forward(reference.args()));
      expect_near(loss, reference["losses"].tensor()[step]);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    set_state_dict_type(model, StateDictType::FullStateDict);
    const StateDict state = state_dict(model);
    const auto names = reference["after"].keys();
    EXPECT_EQ(state.keys(), std::vector<StateKey>(names.begin(), names.end()));
    for (const std::string& name : reference["after"].keys()) {
      SCOPED_TRACE(name);
      expect_near(state.at(name).tensor(), reference["after"][name].tensor());
    }
  });
}

std::vector<Trial> trials() {
  std::vector<Trial> result;
  for (const int size : {1, 2, 4}) {
    for (const auto layout : {ShardLayout::Flat, ShardLayout::Dim0}) {
      result.push_back(
          {"rotary", {"layers.0", "layers.1", "layers.2"}, size, layout});
      result.push_back({"conv", {"conv1", "conv2"}, size, layout});
      result.push_back({"lstm", {"rnn"}, size, layout});
      result.push_back({"mlp", {}, size, layout});
      result.push_back(
          {"rotary",
           {"layers.0", "layers.1", "layers.2"},
           size,
           layout,
           "layers\\.\\d"});
      result.push_back({"conv", {"conv1", "conv2"}, size, layout, "bn\\d"});
      // A block that is called four times, by two paths.
      const std::vector<std::string> blocks{"blocks.0", "blocks.1"};
      result.push_back({"again", blocks, size, layout});
      result.push_back({"again", blocks, size, layout, "blocks\\.\\d|last"});
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ExportedTrainingTest,
    ::testing::ValuesIn(trials()),
    [](const auto& each) {
      return std::string(each.param.name) + "_" +
          (each.param.layout == ShardLayout::Flat ? "Flat" : "Dim0") + "_" +
          std::to_string(each.param.size) +
          (*each.param.recomputed == '\0' ? "" : "_Recomputed");
    });

} // namespace
} // namespace tessera
