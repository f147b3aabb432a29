// Exported models whose submodules are recomputed.
#include <tessera/engine/parameters.h>
#include <tessera/exported/units.h>
#include <tessera/fsdp/fully_shard.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "exported/cases.h"

namespace tessera {
namespace {

using ExportedRecomputeTest = testing::ExportedCases;

using ::testing::ElementsAre;
using testing::exported_case;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::on_ranks;
using testing::Reference;

void step(Exported& model, const Reference& reference) {
  torch::manual_seed(11);
  const at::Tensor loss = loss_of(model->forward(reference.args()));
  EXPECT_TRUE(torch::equal(loss, reference["loss"].tensor()));
  loss.backward();
}

void expect_after(Exported& model, const Reference& reference) {
  for (const auto& [name, tensor] : named_parameters(model)) {
    EXPECT_TRUE(torch::equal(tensor.grad(), reference["grads"][name].tensor()))
        << name;
  }
  for (const auto& buffer : model->named_buffers()) {
    if (reference["after"].contains(buffer.key())) {
      EXPECT_TRUE(torch::equal(
          buffer.value(), reference["after"][buffer.key()].tensor()))
          << buffer.key();
    }
  }
}

/// Gradients and buffers after one step must be Python's.
void expect_step(Exported& model, const Reference& reference) {
  step(model, reference);
  expect_after(model, reference);
}

TEST_F(ExportedRecomputeTest, BlocksProducePyTorchValues) {
  for (const char* name : {"rotary", "rotary_dynamic"}) {
    SCOPED_TRACE(name);
    auto model = load_exported(exported_case(name));
    EXPECT_EQ(
        apply_activation_checkpointing(model, choose_by_path("layers\\.\\d+")),
        2);
    expect_step(model, Reference(name));
  }
}

TEST_F(ExportedRecomputeTest, PartsOfPartsProducePyTorchValues) {
  auto model = load_exported(exported_case("rotary"));
  apply_activation_checkpointing(
      model, choose_by_path("layers\\.\\d+(\\.norm\\d)?"));
  expect_step(model, Reference("rotary"));
}

TEST_F(ExportedRecomputeTest, ABlockThatIsCalledAgainProducesPyTorchValues) {
  auto model = load_exported(exported_case("again"));
  EXPECT_THAT(repeated_blocks(model), ElementsAre("blocks.0", "blocks.1"));
  EXPECT_EQ(
      apply_activation_checkpointing(
          model, choose_by_path("blocks\\.\\d|last")),
      3);
  expect_step(model, Reference("again"));
}

TEST_F(ExportedRecomputeTest, DropoutDropsTheSameTwice) {
  auto model = load_exported(exported_case("dropout"));
  apply_activation_checkpointing(model, choose_by_class({"Dropout"}));
  expect_step(model, Reference("dropout"));
}

TEST_F(ExportedRecomputeTest, BatchNormCountsABatchOnce) {
  auto model = load_exported(exported_case("conv"));
  apply_activation_checkpointing(model, choose_by_class({"BatchNorm2d"}));
  expect_step(model, Reference("conv"));
}

TEST_F(
    ExportedRecomputeTest,
    BatchNormCountsABatchOnceIfTheWholeModelIsRecomputed) {
  for (const char* name : {"conv", "buffers", "buffers_decomposed"}) {
    SCOPED_TRACE(name);
    const Reference reference(name);
    auto model = load_exported(exported_case(name));
    const at::Tensor result =
        recompute(model.ptr(), reference["args"][0].tensor());
    loss_of(result).backward();
    expect_after(model, reference);
  }
}

TEST_F(ExportedRecomputeTest, TheSecondRunHasTheBuffersOfTheFirst) {
  for (const char* name : {"counted", "counted_decomposed"}) {
    SCOPED_TRACE(name);
    const Reference reference(name);
    auto model = load_exported(exported_case(name));
    const at::Tensor x = reference["args"][0].tensor();
    loss_of(recompute(model.ptr(), x)).backward();
    expect_after(model, reference);
  }
}

TEST_F(ExportedRecomputeTest, ASecondRunThatCannotHaveThemIsAnError) {
  const Reference reference("counted");
  auto model = load_exported(exported_case("counted"));
  const at::Tensor x = reference["args"][0].tensor();
  const at::Tensor first = recompute(model.ptr(), x);
  const at::Tensor second = recompute(model.ptr(), torch::ones({3, 4}));
  EXPECT_THAT(
      [&] { loss_of(first).backward(); },
      ::testing::ThrowsMessage<c10::Error>(HasSubstr(
          "the model computes with this buffer and changes it, and it was run again since the run that recompute() repeats")));
  loss_of(second).backward();
}

TEST_F(ExportedRecomputeTest, ABlockHasTheBuffersOfItsFirstRun) {
  for (const char* name : {"typed", "changed_later", "indexed"}) {
    SCOPED_TRACE(name);
    auto model = load_exported(exported_case(name));
    EXPECT_EQ(
        apply_activation_checkpointing(model, choose_by_path("block")), 1);
    expect_step(model, Reference(name));
  }
}

TEST_F(ExportedRecomputeTest, AClonedModelIsRecomputedToo) {
  auto model = load_exported(exported_case("rotary"));
  apply_activation_checkpointing(model, choose_by_path("layers\\.\\d+"));
  Exported copy(std::dynamic_pointer_cast<ExportedImpl>(model->clone()));
  expect_step(copy, Reference("rotary"));
}

/// How many nodes the graph behind a tensor has.
size_t num_nodes(const at::Tensor& tensor) {
  std::set<torch::autograd::Node*> seen;
  const std::function<void(torch::autograd::Node*)> visit =
      [&](torch::autograd::Node* node) {
        if (node != nullptr && seen.insert(node).second) {
          for (const auto& edge : node->next_edges()) {
            visit(edge.function.get());
          }
        }
      };
  visit(tensor.grad_fn().get());
  return seen.size();
}

TEST_F(ExportedRecomputeTest, OneNodeStandsForABlock) {
  const Reference reference("rotary");
  auto model = load_exported(exported_case("rotary"));
  const size_t plain = num_nodes(model->forward(reference["args"][0].tensor()));
  apply_activation_checkpointing(model, choose_by_path("layers\\.\\d+"));
  const size_t fewer = num_nodes(model->forward(reference["args"][0].tensor()));
  EXPECT_LT(fewer, plain / 3);
}

TEST_F(ExportedRecomputeTest, ShardedBlocksProducePyTorchValues) {
  const Reference reference("rotary_steps");
  on_ranks(2, [&](const Group&) {
    torch::set_num_threads(1);
    auto model = load_exported(exported_case("rotary_steps"));
    EXPECT_THAT(
        repeated_blocks(model),
        ElementsAre("layers.0", "layers.1", "layers.2"));
    apply_activation_checkpointing(model, choose_by_class({"RotaryBlock"}));
    fully_shard(model, FullyShardOptions().policy(block_policy(model)));
    const at::Tensor loss = loss_of(model->forward(reference.args()));
    EXPECT_NEAR(
        loss.item<double>(),
        reference["losses"].tensor()[0].item<double>(),
        1e-12);
    loss.backward();
    for (const at::Tensor& parameter : parameters(model)) {
      EXPECT_TRUE(parameter.grad().defined() || parameter.numel() == 0);
    }
  });
}

TEST_F(ExportedRecomputeTest, RefusesAModuleThatChangesAValueOfItsParent) {
  auto model = load_exported(exported_case("interleaved"));
  std::string found = "no error";
  try {
    apply_activation_checkpointing(model, choose_by_path("outer"));
  } catch (const c10::Error& error) {
    found = error.what_without_backtrace();
  }
  EXPECT_THAT(
      found,
      HasSubstr(
          "the nodes of module \"outer\" change a value in place that was made before them. Choose the modules inside it, or the module around it."));
  expect_step(model, Reference("interleaved")); // nothing changed
}

TEST_F(ExportedRecomputeTest, AHiddenWriteToAValueOfTheParentIsAnError) {
  auto model = load_exported(exported_case("interleaved_hidden"));
  const Reference reference("interleaved_hidden");
  EXPECT_EQ(apply_activation_checkpointing(model, choose_by_path("outer")), 1);
  std::string found = "no error";
  try {
    model->forward(reference.args());
  } catch (const c10::Error& error) {
    found = error.what_without_backtrace();
  }
  EXPECT_THAT(
      found,
      HasSubstr(
          "module \"outer\" cannot be recomputed: it changes a value in place that was made before it."));
  auto plain = load_exported(exported_case("interleaved_hidden"));
  expect_step(plain, reference);
}

TEST_F(ExportedRecomputeTest, AModuleOfConstantsAloneMayBeChosen) {
  auto model = load_exported(exported_case("fold_module"));
  EXPECT_EQ(apply_activation_checkpointing(model, choose_by_path("places")), 1);
  expect_step(model, Reference("fold_module"));
}

TEST_F(ExportedRecomputeTest, RefusesAModuleWithoutNodes) {
  auto model = load_exported(exported_case("rotary"));
  std::string found = "no error";
  try {
    apply_activation_checkpointing(model, choose_by_path("layers"));
  } catch (const c10::Error& error) {
    found = error.what_without_backtrace();
  }
  EXPECT_THAT(
      found,
      HasSubstr(
          "no node of the program is of module \"layers\", so there is nothing to recompute."));
}

} // namespace
} // namespace tessera
