// Exported models as modules: names, state, conversion, deferred weights.
#include <tessera/deferred/deferred_init.h>
#include <tessera/engine/parameters.h>
#include <tessera/exported/units.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/fsdp/summon.h>
#include <tessera/transfer/model_state.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exported/cases.h"
#include "support/memory_meter.h"
#include "support/warnings.h"

namespace tessera {
namespace {

using ExportedModuleTest = testing::ExportedCases;

using ::testing::ElementsAre;
using testing::exported_case;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::on_ranks;
using testing::Reference;

TEST_F(ExportedModuleTest, TiedParametersAreOneTensorWithTwoNames) {
  auto model = load_exported(exported_case("rotary"));
  const auto named = model->named_parameters();
  EXPECT_TRUE(named["embed.weight"].is_same(named["head.weight"]));
  EXPECT_EQ(parameters(model).size(), named.size() - 1);
}

TEST_F(ExportedModuleTest, StateDictsHavePythonsEntries) {
  for (const char* name : {"rotary", "conv", "buffers", "views", "lstm"}) {
    SCOPED_TRACE(name);
    auto model = load_exported(exported_case(name));
    const Reference reference(name);
    const auto names = reference["before"].keys();
    const StateDict state = state_dict(model);
    EXPECT_EQ(state.keys(), std::vector<StateKey>(names.begin(), names.end()));
    for (const std::string& key : names) {
      EXPECT_TRUE(torch::equal(
          state.at(key).tensor(), reference["before"][key].tensor()))
          << key;
    }
  }
}

TEST_F(ExportedModuleTest, ABufferThatIsNotPersistentStaysABuffer) {
  auto model = load_exported(exported_case("rotary"));
  EXPECT_THAT(model->named_buffers().keys(), ElementsAre("inverse"));
  EXPECT_FALSE(model->is_persistent("inverse"));
  EXPECT_FALSE(state_dict(model).contains("inverse"));
}

TEST_F(ExportedModuleTest, FrozenParametersStayFrozen) {
  auto model = load_exported(exported_case("views"));
  EXPECT_FALSE(model->named_parameters()["frozen"].requires_grad());
  EXPECT_TRUE(model->named_parameters()["part"].requires_grad());
  Exported copy(std::dynamic_pointer_cast<ExportedImpl>(model->clone()));
  EXPECT_FALSE(copy->named_parameters()["frozen"].requires_grad());
}

TEST_F(ExportedModuleTest, ABufferOfAParametersMemoryIsATensorOfItsOwn) {
  for (const bool clones : {false, true}) {
    SCOPED_TRACE(clones);
    auto model = load_exported(exported_case("anchor"));
    if (clones) {
      model = Exported(std::dynamic_pointer_cast<ExportedImpl>(model->clone()));
    }
    at::Tensor weight = model->named_parameters()["fc.weight"];
    const at::Tensor anchor = model->named_buffers()["anchor"];
    EXPECT_FALSE(weight.is_same(anchor));
    EXPECT_FALSE(anchor.requires_grad());
    {
      const torch::NoGradGuard no_grad;
      weight.add_(1); // as a step does
    }
    EXPECT_TRUE(torch::equal(weight, anchor));
  }
}

TEST_F(ExportedModuleTest, AFrozenCopyDoesNotFreezeTheParameter) {
  auto model = load_exported(exported_case("frozen_copy"));
  const auto named = model->named_parameters();
  EXPECT_TRUE(named["fc.weight"].requires_grad());
  EXPECT_FALSE(named["copy.weight"].requires_grad());
  EXPECT_TRUE(named["fc.weight"].is_alias_of(named["copy.weight"]));
}

TEST_F(ExportedModuleTest, ACloneOfOverlappingBuffersOverlapsToo) {
  auto model = load_exported(exported_case("overlapping"));
  Exported copy(std::dynamic_pointer_cast<ExportedImpl>(model->clone()));
  const at::Tensor late = copy->named_buffers()["late"].clone();
  copy->named_buffers()["early"].add_(1);
  EXPECT_FALSE(torch::equal(copy->named_buffers()["late"], late));
  EXPECT_TRUE(torch::equal(model->named_buffers()["late"], late));
}

TEST_F(ExportedModuleTest, MemoryThatAParameterSharesIsNotSeparated) {
  constexpr const char* kPair =
      "the parameter \"fc.weight\" and the buffer \"anchor\" share";
  const torch::Tensor x = torch::ones({3, 4});
  EXPECT_THAT(
      [] {
        load_exported(
            exported_case("anchor"), ExportedOptions().deferred(true));
      },
      ::testing::ThrowsMessage<c10::NotImplementedError>(HasSubstr(kPair)));
  auto converted = load_exported(exported_case("anchor"));
  converted->to(torch::kDouble);
  EXPECT_THAT(
      [&] { converted->forward(x.to(torch::kDouble)); },
      ::testing::ThrowsMessage<c10::Error>(HasSubstr(kPair)));
  on_ranks(2, [&](const Group&) {
    auto model = load_exported(exported_case("anchor"));
    fully_shard(model);
    EXPECT_THAT(
        [&] { model->forward(x); },
        ::testing::ThrowsMessage<c10::Error>(HasSubstr(kPair)));
  });
}

TEST_F(ExportedModuleTest, ParametersInOneMemoryWithoutACommonElementAreFree) {
  const Reference reference("columns");
  for (const bool defers : {false, true}) {
    on_ranks(2, [&](const Group&) {
      torch::set_num_threads(1);
      auto model = load_exported(
          exported_case("columns"), ExportedOptions().deferred(defers));
      fully_shard(model);
      EXPECT_TRUE(torch::allclose(
          model->forward(reference["args"][0].tensor()),
          reference["leaves"][0].tensor()));
    });
  }
}

TEST_F(ExportedModuleTest, ModulesHavePythonsClasses) {
  auto model = load_exported(exported_case("rotary"));
  EXPECT_EQ(
      model->module_at("layers.0.qkv")->class_name(),
      "torch.nn.modules.linear.Linear");
  EXPECT_THAT(
      model->module_at("layers.1")->class_name(),
      ::testing::EndsWith("RotaryBlock"));
  EXPECT_THAT(repeated_blocks(model), ElementsAre("layers.0", "layers.1"));
}

TEST_F(ExportedModuleTest, ConvertsFloatingTensorsOnly) {
  auto model = load_exported(exported_case("views"));
  model->to(torch::kDouble);
  EXPECT_EQ(model->named_buffers()["index"].scalar_type(), torch::kLong);
  EXPECT_EQ(model->named_parameters()["part"].scalar_type(), torch::kDouble);
  const Reference reference("views");
  const at::Tensor found =
      model->forward(reference["args"][0].tensor().to(torch::kDouble));
  EXPECT_EQ(found.scalar_type(), torch::kDouble);
  EXPECT_TRUE(torch::allclose(
      found.to(torch::kFloat), reference["leaves"][0].tensor(), 1e-4, 1e-5));
}

TEST_F(ExportedModuleTest, InputsMayBeGivenByNameAndFixedOnesLeftOut) {
  auto model = load_exported(exported_case("forms"));
  const Reference reference("forms");
  const ExportedValue whole = model->forward(reference.args());
  const ExportedValue named =
      model->forward(ExportedArgs()
                         .set("options", reference["kwargs"]["options"])
                         .set("pair", reference["args"][1])
                         .set("x", reference["args"][0]));
  EXPECT_TRUE(torch::equal(whole["y"].tensor(), named["y"].tensor()));
  EXPECT_EQ(named["name"].to_string(), "sum");
  EXPECT_EQ(named["scale"].to_float(), 2.5);
  EXPECT_EQ(named["rows"].to_int(), 4);
  EXPECT_TRUE(named["parts"][1][1].is_none());
}

TEST_F(ExportedModuleTest, InputsWithNamesHaveNoOrder) {
  const Reference reference("two_named"); // forward(ids, mask), as mask, ids
  auto model = load_exported(exported_case("two_named"));
  const at::Tensor ids = reference["kwargs"]["ids"].tensor();
  const at::Tensor mask = reference["kwargs"]["mask"].tensor();
  EXPECT_THAT(
      [&] { model->forward(ids, mask); },
      ::testing::ThrowsMessage<c10::ValueError>(HasSubstr(
          "2 positional arguments were given, but the model was exported with 0; it takes \"mask\", \"ids\" by name. Give the other inputs by name: ExportedArgs().set(NAME, VALUE).")));
  EXPECT_THAT(
      [&] { model->forward(ids); },
      ::testing::ThrowsMessage<c10::ValueError>(
          HasSubstr("1 positional arguments were given")));
  const at::Tensor wanted = reference["leaves"][0].tensor();
  const auto result =
      model->forward(ExportedArgs().set("ids", ids).set("mask", mask));
  EXPECT_TRUE(torch::equal(result.tensor(), wanted));
  // One that alone is missing may be meant.
  EXPECT_TRUE(torch::equal(
      model->forward(ExportedArgs{ids}.set("mask", mask)).tensor(), wanted));
  auto other = load_exported(exported_case("one_named"));
  EXPECT_TRUE(torch::equal(
      other->forward(
          Reference("one_named")["args"][0].tensor(),
          Reference("one_named")["kwargs"]["mask"].tensor()),
      Reference("one_named")["leaves"][0].tensor()));
}

TEST_F(ExportedModuleTest, AModeOfAPartIsRefused) {
  auto model = load_exported(exported_case("both_modes"));
  const at::Tensor x = Reference("both_modes")["args"][0].tensor();
  const auto refused = ::testing::ThrowsMessage<c10::ValueError>(HasSubstr(
      "module \"drop\" is in evaluation mode and the model in training mode, but a program has one mode for the whole model."));
  model->module_at("drop")->eval();
  for (int time = 0; time < 2; ++time) {
    EXPECT_THAT([&] { model->forward(x); }, refused);
  }
  model->train();
  model->forward(x);
  model->forward(x);
  model->module_at("drop")->eval();
  EXPECT_THAT([&] { model->forward(x); }, refused);
}

TEST_F(ExportedModuleTest, ReplacingAModuleDoesNotReachTheProgram) {
  const Reference reference("mlp");
  auto model = load_exported(exported_case("mlp"));
  model->replace_module("fc1", torch::nn::Linear(6, 16));
  EXPECT_TRUE(torch::equal(
      model->forward(reference["args"][0].tensor()),
      reference["leaves"][0].tensor()));
}

TEST_F(ExportedModuleTest, TheModeChoosesTheProgram) {
  const Reference reference("both_modes");
  const at::Tensor x = reference["args"][0].tensor();
  auto model = load_exported(exported_case("both_modes"));
  EXPECT_TRUE(model->is_training());
  EXPECT_EQ(model->parameters().size(), 4u);
  for (int time = 0; time < 2; ++time) {
    model->eval();
    EXPECT_TRUE(torch::equal(model->forward(x), reference["eval"].tensor()));
    model->train();
    torch::manual_seed(11);
    EXPECT_TRUE(torch::equal(model->forward(x), reference["train"].tensor()));
  }
}

/// Float32 shards, which are gathered in bfloat16; buffers stay as they are.
void shard_in_float(Exported& model) {
  for (at::Tensor& parameter : model->parameters()) {
    parameter.set_data(parameter.to(torch::kFloat));
  }
  fully_shard(
      model,
      FullyShardOptions()
          .policy(block_policy(model))
          .mp_policy(MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
}

/// Whole gradients must be Python's up to the rounding of bfloat16, which has 8
/// bits: sums are rounded in another order.
void expect_bfloat16_grads(Exported& model, const ExportedValue& grads) {
  const auto whole =
      summon_full_params(model, SummonOptions().with_grads(true));
  for (const std::string& name : grads.keys()) {
    const at::Tensor wanted = grads[name].tensor().to(torch::kFloat);
    const at::Tensor found = model->named_parameters()[name].grad();
    EXPECT_EQ(found.scalar_type(), torch::kFloat) << name;
    EXPECT_LE(
        (found - wanted).abs().max().item<float>(),
        wanted.abs().max().item<float>() / 128)
        << name;
  }
}

TEST_F(ExportedModuleTest, AModelInBFloat16IsComputedFromFloat32Shards) {
  const Reference reference("bfloat16");
  on_ranks(2, [&](const Group&) {
    torch::set_num_threads(1);
    auto model = load_exported(exported_case("bfloat16"));
    shard_in_float(model);
    for (const at::Tensor& shard : parameters(model)) {
      EXPECT_EQ(shard.scalar_type(), torch::kFloat);
    }
    const at::Tensor logits = model->forward(reference["args"][0].tensor());
    EXPECT_EQ(logits.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(torch::equal(logits, reference["leaves"][0].tensor()));
    const at::Tensor loss = loss_of(logits);
    EXPECT_TRUE(torch::equal(loss, reference["loss"].tensor()));
    loss.backward();
    expect_bfloat16_grads(model, reference["grads"]);
  });
}

TEST_F(ExportedModuleTest, APartIsGatheredInTheDtypeThatItWasExportedIn) {
  const Reference reference("two_dtypes");
  on_ranks(2, [&](const Group&) {
    torch::set_num_threads(1);
    auto model = load_exported(exported_case("two_dtypes"));
    for (at::Tensor& parameter : model->module_at("low")->parameters()) {
      parameter.set_data(parameter.to(torch::kFloat));
    }
    fully_shard(
        model->module_at("low"),
        FullyShardOptions().mp_policy(
            MixedPrecisionPolicy().param_dtype(torch::kBFloat16)));
    fully_shard(model);
    const at::Tensor result = model->forward(reference["args"][0].tensor());
    EXPECT_TRUE(torch::equal(result, reference["leaves"][0].tensor()));
    loss_of(result).backward();
    expect_bfloat16_grads(model, reference["grads"]);
  });
}

/// Bytes that autograd keeps of a second forward, and the logits: what is made
/// once is there then.
size_t kept_bytes(Exported& model, const at::Tensor& ids) {
  loss_of(model->forward(ids)).backward();
  const testing::MemoryMeter meter;
  const at::Tensor logits = model->forward(ids);
  reshard(model); // parameters that are gathered are no activations
  return meter.live_bytes();
}

TEST_F(ExportedModuleTest, AutogradKeepsAsManyBytesInBFloat16AsInPython) {
  const Reference reference("bfloat16");
  const at::Tensor ids = reference["args"][0].tensor();
  const auto wanted = static_cast<size_t>(reference["saved_bytes"].to_int()) +
      reference["leaves"][0].tensor().nbytes();
  auto plain = load_exported(exported_case("bfloat16"));
  EXPECT_EQ(kept_bytes(plain, ids), wanted);
  on_ranks(2, [&](const Group&) {
    torch::set_num_threads(1);
    auto model = load_exported(exported_case("bfloat16"));
    shard_in_float(model);
    size_t of_block = 0; // memory to gather it stays for the next
    for (const at::Tensor& each : model->module_at("layers.0")->parameters()) {
      of_block += static_cast<size_t>(each.numel()) * sizeof(at::BFloat16);
    }
    const size_t kept = kept_bytes(model, ids);
    EXPECT_GE(kept, wanted);
    EXPECT_LE(kept, wanted + of_block);
  });
}

TEST_F(ExportedModuleTest, WeightsThatTheFileLacksAreTiedAsInPython) {
  for (const bool defers : {false, true}) {
    SCOPED_TRACE(defers);
    auto model = load_exported(
        exported_case("missing"),
        ExportedOptions().allow_missing(true).deferred(defers));
    const auto named = model->named_parameters();
    EXPECT_TRUE(named["first.weight"].is_same(named["last.weight"]));
    EXPECT_FALSE(named["first.weight"].is_same(named["other.weight"]));
  }
  // A file of torch.export.save does not tell: all have one payload.
  auto plain = load_exported(
      exported_case("missing_of_torch"), ExportedOptions().allow_missing(true));
  const auto named = plain->named_parameters();
  EXPECT_FALSE(named["first.weight"].is_same(named["other.weight"]));
}

TEST_F(ExportedModuleTest, ActivationsDieWithTheirLastUse) {
  const Reference reference("chain"); // 8 nodes of 4 MiB each
  auto model = load_exported(exported_case("chain"));
  const torch::NoGradGuard no_grad;
  model->forward(reference["args"][0].tensor());
  testing::MemoryMeter meter;
  model->forward(reference["args"][0].tensor());
  EXPECT_LT(meter.peak_bytes(), size_t{9} << 20); // two of them
}

TEST_F(ExportedModuleTest, TheModelMayGoBeforeBackward) {
  const Reference reference("rotary");
  at::Tensor loss;
  at::Tensor weight;
  {
    auto model = load_exported(exported_case("rotary"));
    apply_activation_checkpointing(model, choose_by_path("layers\\.\\d+"));
    weight = model->named_parameters()["norm.weight"];
    loss = loss_of(model->forward(reference.args()));
  }
  loss.backward();
  EXPECT_TRUE(
      torch::equal(weight.grad(), reference["grads"]["norm.weight"].tensor()));
}

TEST_F(ExportedModuleTest, DeferredWeightsAreReadWhenTheyAreNeeded) {
  const Reference reference("rotary");
  auto model =
      load_exported(exported_case("rotary"), ExportedOptions().deferred(true));
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(is_deferred(parameter));
  }
  EXPECT_THROW(model->forward(reference.args()), c10::Error);
  materialize(model);
  const auto named = model->named_parameters();
  EXPECT_TRUE(named["embed.weight"].is_same(named["head.weight"]));
  EXPECT_TRUE(torch::equal(
      model->forward(reference["args"][0].tensor()),
      reference["leaves"][0].tensor()));
}

TEST_F(ExportedModuleTest, ADeferredInitAroundTheCallDefersTheWeights) {
  const Reference reference("views");
  Exported model(nullptr);
  {
    const DeferredInit deferred;
    model = load_exported(exported_case("views"));
  }
  EXPECT_TRUE(is_deferred(model->parameters().front()));
  materialize(model);
  EXPECT_TRUE(torch::equal(
      model->forward(reference["args"][0].tensor()),
      reference["leaves"][0].tensor()));
}

TEST_F(ExportedModuleTest, AModelWithoutRepeatedBlocksIsOneUnitWithAWarning) {
  const auto model = load_exported(exported_case("views"));
  EXPECT_TRUE(repeated_blocks(model).empty());
  const testing::Warnings warnings;
  (void)block_policy(model);
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_THAT(warnings.texts[0], HasSubstr("no repeated blocks"));
}

TEST_F(ExportedModuleTest, DeferredWeightsAreShardedAsTheyAreRead) {
  const Reference reference("rotary_steps");
  on_ranks(2, [&](const Group&) {
    torch::set_num_threads(1);
    auto model = load_exported(
        exported_case("rotary_steps"), ExportedOptions().deferred(true));
    fully_shard(model, FullyShardOptions().policy(block_policy(model)));
    EXPECT_NEAR(
        loss_of(model->forward(reference.args())).item<double>(),
        reference["losses"].tensor()[0].item<double>(),
        1e-12);
  });
}

} // namespace
} // namespace tessera
