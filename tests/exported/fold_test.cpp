// What depends on constants alone is computed once; see fold_cases.py.
#include <tessera/deferred/deferred_init.h>
#include <tessera/exported/units.h>
#include <tessera/recompute/recompute.h>

#include <gtest/gtest.h>

#include "exported/autocast_guard.h"
#include "exported/cases.h"
#include "exported/memory_roots.h"
#include "exported/steps.h"
#include "support/memory_meter.h"

namespace tessera {
namespace {

using testing::exported_case;
using testing::leaves_of;
using testing::Reference;

constexpr size_t kSmall = size_t{1} << 20;

using FoldCase = std::pair<const char*, size_t>; // and how many nodes are gone

class ExportedFoldTest : public testing::ExportedCases {};
class ExportedFoldCaseTest : public testing::ExportedCases,
                             public ::testing::WithParamInterface<FoldCase> {};

std::vector<at::Tensor> results_of(Exported& model, const ExportedArgs& args) {
  torch::manual_seed(11);
  return model->forward(args).tensors();
}

TEST_P(ExportedFoldCaseTest, RunsTheNodesThatAreLeftWithPythonsBits) {
  const auto& [name, num_folded] = GetParam();
  const Reference reference(name);
  auto model = load_exported(exported_case(name));
  EXPECT_EQ(
      model->num_nodes() + num_folded,
      static_cast<size_t>(reference["nodes"].to_int()));
  for (int run = 0; run < 2; ++run) { // the second finds what the first left
    const auto results = results_of(model, reference.args());
    ASSERT_EQ(results.size(), reference["leaves"].size());
    for (size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(torch::equal(results[i], reference["leaves"][i].tensor()))
          << "result " << i << " of run " << run;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ExportedFoldCaseTest,
    ::testing::Values(
        FoldCase{"folded", 10}, // four of them are the graph under no_grad
        FoldCase{"fold_written", 0},
        FoldCase{"fold_written_tensor", 2},
        FoldCase{"fold_nested_written", 0},
        FoldCase{"fold_nested_dropout", 0},
        FoldCase{"fold_nested_type_as", 0},
        FoldCase{"fold_two_names", 0},
        FoldCase{"fold_returned", 0},
        FoldCase{"fold_random", 1},
        FoldCase{"fold_unfilled", 0},
        FoldCase{"fold_derived", 0},
        FoldCase{"fold_large", 0},
        FoldCase{"fold_many", 82}, // 16 MiB of 24 MB
        FoldCase{"fold_expanded", 2}, // the tensor, not the view of it
        FoldCase{"fold_conjugated", 3},
        FoldCase{"fold_sparse", 1},
        FoldCase{"fold_module", 2},
        FoldCase{"fold_products", 4},
        FoldCase{"fold_half_products", 5},
        FoldCase{"fold_callers_dtype", 3},
        FoldCase{"fold_autocast", 4}),
    [](const auto& each) { return std::string(each.param.first); });

TEST_F(ExportedFoldTest, GradientsAreThoseOfPython) {
  const Reference reference("folded");
  auto model = load_exported(exported_case("folded"));
  testing::loss_of(model->forward(reference.args())).backward();
  for (const auto& item : model->named_parameters()) {
    EXPECT_TRUE(torch::equal(
        item.value().grad(), reference["grads"][item.key()].tensor()))
        << item.key();
  }
}

TEST_F(ExportedFoldTest, ACallerMayWriteToAReturnedConstant) {
  const Reference reference("fold_returned");
  auto model = load_exported(exported_case("fold_returned"));
  for (at::Tensor result : results_of(model, reference.args())) {
    result.zero_();
  }
  const auto again = results_of(model, reference.args());
  for (size_t i = 0; i < again.size(); ++i) {
    EXPECT_TRUE(torch::equal(again[i], reference["leaves"][i].tensor()));
  }
}

TEST_F(ExportedFoldTest, RandomNumbersAreDrawnInEachRun) {
  const Reference reference("fold_random");
  auto model = load_exported(exported_case("fold_random"));
  const at::Tensor first = model->forward(reference["args"][0].tensor());
  const at::Tensor second = model->forward(reference["args"][0].tensor());
  EXPECT_FALSE(torch::equal(first, second));
}

TEST_F(ExportedFoldTest, ParametersAndBuffersMayChange) {
  const Reference reference("fold_derived");
  auto model = load_exported(exported_case("fold_derived"));
  const at::NoGradGuard no_grad;
  at::Tensor weight = model->named_parameters()["weight"];
  at::Tensor offset = model->named_buffers()["offset"];
  weight.fill_(2);
  offset.fill_(3);
  const at::Tensor x = reference["args"][0].tensor();
  EXPECT_TRUE(torch::equal(model->forward(x), x * weight.exp() + offset.exp()));
}

TEST_F(ExportedFoldTest, AutocastOfTheCallerStillDecides) {
  const Reference reference("fold_products");
  auto model = load_exported(exported_case("fold_products"));
  const at::Tensor x = reference["args"][0].tensor();
  const at::Tensor table = torch::arange(9.0).view({3, 3}) / 7;
  const exported::AutocastGuard autocast(
      torch::kCPU, true, torch::kBFloat16, true);
  const auto results = results_of(model, reference.args());
  EXPECT_TRUE(torch::equal(results[0], x + torch::matmul(table, table)));
  EXPECT_TRUE(torch::equal(results[1], x + (table + table)));
}

TEST_F(ExportedFoldTest, AutocastOfTheCallerMayBeToFloat16) {
  for (const char* name : {"fold_half_products", "fold_callers_dtype"}) {
    SCOPED_TRACE(name);
    const Reference reference(name);
    auto model = load_exported(exported_case(name));
    const at::Tensor x = reference["args"][0].tensor();
    at::Tensor table = torch::arange(9.0).view({3, 3}) / 7;
    table = name == std::string("fold_half_products")
        ? table.to(torch::kBFloat16)
        : table;
    const exported::AutocastGuard autocast(
        torch::kCPU, true, torch::kHalf, true);
    const at::Tensor product = torch::mm(table, table);
    EXPECT_EQ(product.scalar_type(), torch::kHalf);
    EXPECT_TRUE(torch::equal(model->forward(x), x + product));
  }
}

TEST_F(ExportedFoldTest, AnotherProgramMayWriteToAConstant) {
  auto model = load_exported(exported_case("phases"));
  const at::Tensor x = torch::randn(3);
  model->eval();
  EXPECT_TRUE(torch::equal(model->forward(x), x - torch::arange(3.0)));
  model->train();
  EXPECT_TRUE(torch::equal(model->forward(x), x * 2)); // keeps x
  model->eval();
  const at::Tensor y = torch::randn(3);
  EXPECT_TRUE(torch::equal(model->forward(y), y - x));
}

TEST_F(ExportedFoldTest, LoadingRunsNothingOfTheFile) {
  const auto path = exported_case("fold_understated");
  const testing::MemoryMeter meter;
  auto model = load_exported(path);
  EXPECT_LT(meter.peak_bytes(), kSmall);
}

TEST_F(ExportedFoldTest, ValuesThatAreLargerThanTheFileSaysAreNotKept) {
  const Reference reference("fold_understated");
  const auto path = exported_case("fold_understated");
  const testing::MemoryMeter meter;
  auto model = load_exported(path);
  EXPECT_EQ(
      model->num_nodes(), static_cast<size_t>(reference["nodes"].to_int()));
  EXPECT_LT(meter.live_bytes(), kSmall);
  EXPECT_LT(meter.peak_bytes(), size_t{65} << 20); // it was computed once
}

TEST_F(ExportedFoldTest, AnExpandedConstantIsNotWrittenOut) {
  const auto path = exported_case("fold_expanded");
  const testing::MemoryMeter meter;
  auto model = load_exported(path);
  (void)model->num_nodes();
  EXPECT_LT(meter.peak_bytes(), kSmall);
}

TEST_F(ExportedFoldTest, LongChainsOfViewsAreFollowedInNoTime) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::alias", "");
  exported::Code code;
  code.num_slots = 200'001;
  code.inputs = {0};
  for (uint32_t slot = 0; slot + 1 < code.num_slots; ++slot) {
    auto step = std::make_unique<exported::OperatorStep>(op);
    step->operands.push_back(
        {.source = {exported::Source::From::Slot, slot}, .elements = {}});
    step->shared = {0};
    step->results.push_back({.slots = {static_cast<int32_t>(slot) + 1}});
    code.steps.push_back(std::move(step));
  }
  code.steps.back()->written = {0};
  const exported::MemoryRoots roots(code);
  EXPECT_TRUE(roots.writes_inputs());
  EXPECT_TRUE(roots.is_kept(0));
}

TEST_F(ExportedFoldTest, ConvertedModelsComputeConstantsAgain) {
  const Reference reference("folded");
  auto model = load_exported(exported_case("folded"));
  const size_t num_nodes = model->num_nodes();
  const at::Tensor x = reference["args"][0].tensor();
  const at::Tensor wanted = reference["leaves"][0].tensor();
  model->to(torch::kDouble);
  const at::Tensor found = model->forward(x.to(torch::kDouble));
  EXPECT_EQ(found.scalar_type(), torch::kDouble);
  EXPECT_TRUE(torch::allclose(found.to(torch::kFloat), wanted, 1e-4, 1e-5));
  EXPECT_EQ(model->num_nodes(), num_nodes);
  const at::Device device(
      torch::cuda::is_available() ? torch::kCUDA : torch::kCPU);
  model->to(device, torch::kFloat);
  const at::Tensor again = model->forward(x.to(device));
  EXPECT_TRUE(torch::allclose(again.cpu(), wanted, 1e-4, 1e-5));
  EXPECT_EQ(model->num_nodes(), num_nodes);
}

TEST_F(ExportedFoldTest, ClonesHaveTheConstantsOfTheModel) {
  for (const char* name : {"folded", "fold_two_names"}) {
    SCOPED_TRACE(name);
    const Reference reference(name);
    auto model = load_exported(exported_case(name));
    const size_t num_nodes = model->num_nodes();
    Exported copy(std::dynamic_pointer_cast<ExportedImpl>(model->clone()));
    EXPECT_EQ(copy->num_nodes(), num_nodes);
    model = nullptr;
    EXPECT_TRUE(torch::equal(
        results_of(copy, reference.args())[0],
        reference["leaves"][0].tensor()));
  }
}

TEST_F(ExportedFoldTest, ConstantsFollowTheDefaultDtype) {
  const Reference reference("fold_products");
  auto model = load_exported(exported_case("fold_products"));
  const at::Tensor x = reference["args"][0].tensor();
  EXPECT_EQ(results_of(model, reference.args())[0].dtype(), torch::kFloat);
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kDouble));
  const at::Tensor table = torch::arange(9.0).view({3, 3}) / 7;
  const at::Tensor wanted = x + table + table;
  const auto found = results_of(model, reference.args())[1];
  torch::set_default_dtype(torch::scalarTypeToTypeMeta(torch::kFloat));
  EXPECT_EQ(found.dtype(), wanted.dtype());
  EXPECT_TRUE(torch::allclose(found, wanted));
  EXPECT_EQ(results_of(model, reference.args())[0].dtype(), torch::kFloat);
}

TEST_F(ExportedFoldTest, DeferredModelsFoldWhenTheyHaveMemory) {
  const Reference reference("folded");
  auto model =
      load_exported(exported_case("folded"), ExportedOptions().deferred(true));
  const size_t before = model->num_nodes();
  materialize(model);
  EXPECT_EQ(model->num_nodes() + 10, before);
  EXPECT_TRUE(torch::equal(
      model->forward(reference["args"][0].tensor()),
      reference["leaves"][0].tensor()));
}

TEST_F(ExportedFoldTest, RecomputedModulesReadFoldedConstants) {
  const Reference reference("rotary");
  auto plain = load_exported(exported_case("rotary"));
  auto model = load_exported(exported_case("rotary"));
  EXPECT_LT(
      plain->num_nodes(), static_cast<size_t>(reference["nodes"].to_int()));
  apply_activation_checkpointing(model, choose_by_path("layers\\.\\d+"));
  testing::loss_of(plain->forward(reference.args())).backward();
  testing::loss_of(model->forward(reference.args())).backward();
  for (const auto& item : plain->named_parameters()) {
    EXPECT_TRUE(torch::equal(
        model->named_parameters()[item.key()].grad(), item.value().grad()))
        << item.key();
  }
}

} // namespace
} // namespace tessera
