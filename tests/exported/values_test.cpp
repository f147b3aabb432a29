// Results and gradients of exported models, bit for bit those of Python.
#include <tessera/engine/parameters.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "exported/cases.h"

namespace tessera {
namespace {

using testing::exported_case;
using testing::leaves_of;
using testing::loss_of;
using testing::Reference;

class ExportedValuesTest : public testing::ExportedCases,
                           public ::testing::WithParamInterface<const char*> {};

/// Python runs scan() with other kernels than those of the graph, and the model
/// with others than those of its decomposed program, which cannot be trained in
/// Python: its buffers are overwritten before backward.
bool runs_other_kernels() {
  const std::string test =
      ::testing::UnitTest::GetInstance()->current_test_info()->name();
  return test.ends_with("loops") || test.ends_with("conv_decomposed");
}

void expect_same(const ExportedValue& found, const ExportedValue& wanted) {
  ASSERT_EQ(found.kind(), wanted.kind())
      << found.describe() << " in place of " << wanted.describe();
  for (size_t i = 0; i < wanted.size(); ++i) {
    expect_same(found[i], wanted[i]);
  }
  if (wanted.is_tensor()) {
    EXPECT_EQ(found.tensor().scalar_type(), wanted.tensor().scalar_type());
    EXPECT_TRUE(
        runs_other_kernels()
            ? torch::allclose(found.tensor(), wanted.tensor(), 1e-5, 1e-6)
            : torch::equal(found.tensor(), wanted.tensor()))
        << "by " << (found.tensor() - wanted.tensor()).abs().max();
  } else {
    EXPECT_EQ(found.describe(), wanted.describe());
  }
}

/// What must be Python's after one step.
void expect_python(Exported& model, const Reference& reference) {
  const auto names = reference["names"];
  std::vector<std::string> python_names;
  for (size_t i = 0; i < names.size(); ++i) {
    python_names.push_back(names[i].to_string());
  }
  EXPECT_EQ(model->named_parameters().keys(), python_names);

  torch::manual_seed(11);
  const ExportedValue result = model->forward(reference.args());
  std::vector<ExportedValue> leaves;
  leaves_of(result, leaves);
  ASSERT_EQ(leaves.size(), reference["leaves"].size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    SCOPED_TRACE("result " + std::to_string(i));
    expect_same(leaves[i], reference["leaves"][i]);
  }
  const at::Tensor loss = loss_of(result);
  expect_same(loss.detach(), reference["loss"]);
  if (loss.requires_grad()) {
    loss.backward();
  }
  size_t with_gradient = 0;
  for (const auto& [name, tensor] : named_parameters(model)) {
    SCOPED_TRACE(name);
    ASSERT_EQ(tensor.grad().defined(), reference["grads"].contains(name));
    if (tensor.grad().defined()) {
      ++with_gradient;
      expect_same(tensor.grad(), reference["grads"][name]);
    }
  }
  EXPECT_EQ(with_gradient, reference["grads"].size());
  for (size_t i = 0; i < reference["args"].size(); ++i) {
    SCOPED_TRACE("argument " + std::to_string(i));
    expect_same(reference["args"][i], reference["args_after"][i]);
  }
  for (const auto& buffer : model->named_buffers()) {
    if (reference["after"].contains(buffer.key())) {
      SCOPED_TRACE(buffer.key());
      expect_same(buffer.value(), reference["after"][buffer.key()]);
    }
  }
}

TEST_P(ExportedValuesTest, ProducesPyTorchValues) {
  const Reference reference(GetParam());
  auto model = load_exported(exported_case(GetParam()));
  EXPECT_TRUE(model->is_training());
  expect_python(model, reference);
}

TEST_P(ExportedValuesTest, ACloneProducesPyTorchValues) {
  const Reference reference(GetParam());
  auto model = load_exported(exported_case(GetParam()));
  Exported copy(std::dynamic_pointer_cast<ExportedImpl>(model->clone()));
  model->apply([](torch::nn::Module& module) { // which the copy does not see
    const torch::NoGradGuard no_grad;
    for (auto& parameter : module.parameters(/*recurse=*/false)) {
      parameter.zero_();
    }
  });
  expect_python(copy, reference);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ExportedValuesTest,
    ::testing::Values(
        "mlp",
        "dropout",
        "rotary",
        "rotary_dynamic",
        "rotary_decomposed",
        "conv",
        "conv_decomposed",
        "lstm",
        "gru",
        "cond_left",
        "cond_right",
        "loops",
        "autocast",
        "forms",
        "symbolic",
        "chosen",
        "buffers",
        "buffers_decomposed",
        "even",
        "input_changed",
        "input_changed_decomposed",
        "interleaved",
        "views",
        "anchor",
        "frozen_copy",
        "columns",
        "overlapping",
        "typed",
        "changed_later",
        "indexed",
        "counted",
        "counted_decomposed",
        "two_named"),
    [](const auto& name) { return std::string(name.param); });

} // namespace
} // namespace tessera
