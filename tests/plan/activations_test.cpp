// What plans of exported programs count, operator by operator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/activations/graph_walk.h"
#include "plan/activations/repeated_blocks.h"
#include "plan/checked.h"

namespace tessera::plan {
namespace {

using exported::Argument;
using exported::Expression;
using exported::TensorName;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kFloat = 4;
constexpr int64_t kRandomState = 5056;

Argument tensor(const std::string& name) {
  return {TensorName{name}};
}

/// A program that is written down node by node.
class Written {
 public:
  /// The shape of a tensor; empty expressions for dynamic sizes.
  void shape(const std::string& name, std::vector<int64_t> sizes) {
    exported::TensorMeta meta;
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      meta.sizes.insert(meta.sizes.begin(), {.value = sizes[i]});
      meta.strides.insert(meta.strides.begin(), {.value = stride});
      stride *= sizes[i];
    }
    meta.storage_offset = {.value = int64_t{0}};
    program.graph.tensors[name] = meta;
  }
  void input(const std::string& name, std::vector<int64_t> sizes) {
    shape(name, std::move(sizes));
    program.graph.inputs.push_back(tensor(name));
    program.inputs.emplace_back(exported::UserInput{tensor(name)});
  }
  void param(const std::string& path, std::vector<int64_t> sizes) {
    shape(path, std::move(sizes));
    program.graph.tensors[path].requires_grad = true;
    program.graph.inputs.push_back(tensor(path));
    program.inputs.emplace_back(exported::ParameterInput{path, path});
    const size_t number = options.params.size();
    options.params[path] = {.unit = 0, .param = number};
  }
  /// NAME = TARGET(operands), of module `path`.
  void node(
      const std::string& name,
      const std::string& target,
      std::vector<std::pair<std::string, std::string>> operands,
      std::vector<int64_t> sizes,
      const std::string& path = "") {
    shape(name, std::move(sizes));
    exported::Node node;
    node.target = "torch.ops.aten." + target;
    for (auto& [formal, operand] : operands) {
      node.inputs.push_back({.name = formal, .argument = tensor(operand)});
    }
    node.outputs.push_back(tensor(name));
    node.modules.push_back({.path = "", .class_name = "Model"});
    if (!path.empty()) {
      node.modules.push_back({.path = path, .class_name = "Block"});
    }
    program.graph.nodes.push_back(std::move(node));
  }
  void result(const std::string& name) {
    program.graph.outputs.push_back(tensor(name));
    exported::OutputSpec spec;
    spec.argument = tensor(name);
    program.outputs.push_back(spec);
  }

  Walk walk(const InputSizes& sizes = {}) const {
    return walk_through(program, GraphSizes(program, sizes), options);
  }

  exported::Program program;
  WalkOptions options;
};

struct Bytes {
  int64_t now = 0;
  int64_t most = 0;
};

Bytes after(const StepEvents& events, int64_t before = 0) {
  Bytes bytes{before, before};
  for (const StepEvent& event : events) {
    if (event.kind == StepEvent::Kind::Allocate) {
      bytes.now += event.bytes;
    } else if (event.kind == StepEvent::Kind::Free) {
      bytes.now -= event.bytes;
    }
    bytes.most = std::max(bytes.most, bytes.now);
  }
  return bytes;
}

/// The parameters that got gradients, in their order.
std::vector<size_t> gradients_in(const StepEvents& events) {
  std::vector<size_t> params;
  for (const StepEvent& event : events) {
    if (event.kind == StepEvent::Kind::Gradient) {
      params.push_back(event.param);
    }
  }
  return params;
}

/// x (2, 3) -> linear -> tanh -> linear -> sum
Written perceptron(const std::string& function = "tanh.default") {
  Written written;
  written.param("blocks.0.weight", {5, 3});
  written.param("blocks.1.weight", {3, 5});
  written.input("x", {2, 3});
  written.node(
      "up",
      "linear.default",
      {{"input", "x"}, {"weight", "blocks.0.weight"}},
      {2, 5},
      "blocks.0");
  written.node("act", function, {{"self", "up"}}, {2, 5}, "blocks.0");
  written.node(
      "down",
      "linear.default",
      {{"input", "act"}, {"weight", "blocks.1.weight"}},
      {2, 3},
      "blocks.1");
  written.node("loss", "sum.default", {{"self", "down"}}, {}, "");
  written.result("loss");
  return written;
}

TEST(ActivationsTest, AForwardLeavesWhatBackwardNeeds) {
  const Walk walk = perceptron().walk();
  // x is the caller's and saved, tanh saves its result, which the second linear
  // saves too.
  EXPECT_EQ(after(walk.forward).now, (6 + 10) * kFloat);
  EXPECT_EQ(after(walk.forward).most, (6 + 10 + 10) * kFloat);
  EXPECT_EQ(after(walk.backward, after(walk.forward).now).now, 0);
  EXPECT_THAT(gradients_in(walk.backward), ElementsAre(1, 0));
  EXPECT_TRUE(walk.unknown.empty());
  EXPECT_TRUE(walk.is_loss);
}

TEST(ActivationsTest, AUnitEndsWithItsLastGradient) {
  const Walk walk = perceptron().walk();
  ASSERT_FALSE(walk.backward.empty());
  std::vector<StepEvent::Kind> kinds;
  for (const StepEvent& event : walk.backward) {
    if (event.kind == StepEvent::Kind::Gradient ||
        event.kind == StepEvent::Kind::FinishUnit) {
      kinds.push_back(event.kind);
    }
  }
  using Kind = StepEvent::Kind;
  EXPECT_THAT(
      kinds, ElementsAre(Kind::Gradient, Kind::Gradient, Kind::FinishUnit));
}

TEST(ActivationsTest, WhatAnOperatorSavesDependsOnTheOperator) {
  // relu saves its result, as tanh does; gelu its input, beside the result that
  // the second linear saves.
  EXPECT_EQ(
      after(perceptron("relu.default").walk().forward).now, (6 + 10) * kFloat);
  EXPECT_EQ(
      after(perceptron("gelu.default").walk().forward).now,
      (6 + 10 + 10) * kFloat);
  EXPECT_EQ(
      after(perceptron("neg.default").walk().forward).now, (6 + 10) * kFloat);
}

TEST(ActivationsTest, AnUnknownOperatorIsNamedAndItsResultIsSaved) {
  const Walk walk = perceptron("wobble.default").walk();
  EXPECT_THAT(walk.unknown, ElementsAre("wobble"));
  EXPECT_EQ(after(walk.forward).now, (6 + 10) * kFloat);
  EXPECT_EQ(after(walk.backward, after(walk.forward).now).now, 0);
}

TEST(ActivationsTest, ARecomputedBlockKeepsItsInput) {
  Written written = perceptron("gelu.default");
  EXPECT_THAT(
      repeated_blocks(written.program), ElementsAre("blocks.0", "blocks.1"));
  written.options.recomputed = {"blocks.0"};
  const Walk walk = written.walk();
  // x, what the second linear saves, and the state of the random numbers.
  EXPECT_EQ(after(walk.forward).now, (6 + 10) * kFloat + kRandomState);
  const Bytes backward = after(walk.backward, after(walk.forward).now);
  EXPECT_EQ(backward.now, 0);
  EXPECT_GE(backward.most, after(walk.forward).now + 10 * kFloat);
  EXPECT_THAT(gradients_in(walk.backward), ElementsAre(1, 0));
}

TEST(ActivationsTest, AViewHasNoMemoryOfItsOwn) {
  Written written;
  written.param("weight", {5, 3});
  written.input("x", {2, 3});
  written.node("flat", "view.default", {{"self", "x"}}, {6});
  written.node("again", "view.default", {{"self", "flat"}}, {2, 3});
  written.node(
      "up",
      "linear.default",
      {{"input", "again"}, {"weight", "weight"}},
      {2, 5});
  written.node("loss", "sum.default", {{"self", "up"}}, {});
  written.result("loss");
  EXPECT_EQ(after(written.walk().forward).now, 6 * kFloat);
}

TEST(ActivationsTest, WhatHasNoGradientSavesNothing) {
  Written written;
  written.input("x", {2, 3});
  written.node("y", "tanh.default", {{"self", "x"}}, {2, 3});
  written.result("y");
  const Walk walk = written.walk();
  EXPECT_EQ(after(walk.forward).now, 6 * kFloat); // x itself
  EXPECT_EQ(after(walk.backward, after(walk.forward).now).now, 0);
  EXPECT_TRUE(walk.loss.empty());
}

TEST(ActivationsTest, ABranchThatTheLossDoesNotNeedIsFreed) {
  Written written = perceptron();
  written.node("aside", "gelu.default", {{"self", "down"}}, {2, 3});
  written.result("aside");
  EXPECT_EQ(after(written.walk().forward).now, (6 + 10) * kFloat);
}

TEST(ActivationsTest, ACrossEntropyIsTheLossOfWhatIsNotOneNumber) {
  Written written;
  written.param("weight", {5, 3});
  written.input("x", {2, 3});
  written.node(
      "logits",
      "linear.default",
      {{"input", "x"}, {"weight", "weight"}},
      {2, 5});
  written.result("logits");
  const Walk walk = written.walk();
  EXPECT_FALSE(walk.is_loss);
  // x, the log-softmax, targets, the loss and the sum of the weights.
  EXPECT_EQ(after(walk.forward).now, (6 + 10 + 2) * kFloat + 2 * 8);
}

TEST(ActivationsTest, RefusesSizesThatTheProgramWasNotExportedFor) {
  Written written = perceptron();
  const auto error = [&](const InputSizes& sizes) -> std::string {
    try {
      written.walk(sizes);
    } catch (const PlanError& refused) {
      return refused.what();
    }
    return "nothing was thrown";
  };
  EXPECT_THAT(
      error({.batch = 4}),
      HasSubstr("--batch: the program was exported for one size"));
  const Expression<int64_t> batch{
      .value = "Symbol('s0', integer=True)", .at_export = 2};
  for (const char* name : {"x", "up", "act", "down"}) {
    written.program.graph.tensors[name].sizes[0] = batch;
  }
  written.program.ranges["s0"] = {.min = 2, .max = 8};
  EXPECT_EQ(after(written.walk().forward).now, (6 + 10) * kFloat);
  EXPECT_EQ(
      after(written.walk({.batch = 8}).forward).now, 4 * (6 + 10) * kFloat);
  EXPECT_THAT(
      error({.batch = 9}),
      HasSubstr("--batch is 9: the program was exported for 2 to 8"));
  EXPECT_EQ(batch_range(written.program).most, 8);
}

TEST(ActivationsTest, SizesThatDependOnDataAreNotKnown) {
  Written written = perceptron();
  written.program.graph.tensors["act"].sizes[0] = {
      .value = "Symbol('u0', integer=True)"};
  EXPECT_THROW(written.walk(), exported::UnknownSize);
  written.program.graph.tensors.erase("act");
  EXPECT_THROW(written.walk(), exported::UnknownSize);
}

TEST(ActivationsTest, WhatReshapeCanSeeWithoutACopy) {
  const TensorShape whole = shape_of({2, 3, 4}, format::DType::Float32);
  EXPECT_TRUE(can_view(whole, {6, 4}));
  EXPECT_TRUE(can_view(whole, {2, 12}));
  TensorShape transposed = whole; // (3, 2, 4)
  std::swap(transposed.sizes[0], transposed.sizes[1]);
  std::swap(transposed.strides[0], transposed.strides[1]);
  EXPECT_FALSE(can_view(transposed, {6, 4}));
  EXPECT_TRUE(can_view(transposed, {3, 2, 2, 2}));
  EXPECT_FALSE(transposed.is_contiguous());
  EXPECT_EQ(dense_like(transposed).strides, transposed.strides);
}

} // namespace
} // namespace tessera::plan
