// Expressions of sizes and inputs, and what is read from a program without
// running it.
#include "exported/formula.h"

#include <tessera/error.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "exported/frozen_mode.h"
#include "exported/python_math.h"
#include "exported/signature.h"

namespace tessera::exported {
namespace {

const FormulaNames kNames{
    .symbol = [](const std::string& name) -> std::optional<size_t> {
      return name == "s0" ? std::optional<size_t>(0)
          : name == "s77" ? std::optional<size_t>(1)
                          : std::nullopt;
    },
    .input = [](const std::string& name) -> std::optional<size_t> {
      return name == "x"        ? std::optional<size_t>(0)
          : name == "d['k'][1]" ? std::optional<size_t>(1)
                                : std::nullopt;
    }};

c10::IValue value_of(const std::string& text) {
  const std::vector<int64_t> symbols{7, -3};
  const std::vector<c10::IValue> inputs{torch::zeros({4, 5}), 9};
  return Formula::parse(text, kNames)
      .evaluate({.symbols = symbols, .inputs = inputs});
}

TEST(FormulaTest, FollowsPythonsArithmetic) {
  EXPECT_EQ(value_of("s0//2").toInt(), 3);
  EXPECT_EQ(value_of("s77//2").toInt(), -2);
  EXPECT_EQ(value_of("s77 % 2").toInt(), 1);
  EXPECT_EQ(value_of("s0 % -4").toInt(), -1);
  EXPECT_EQ(value_of("-s0**2").toInt(), -49);
  EXPECT_EQ(value_of("2*s0 + 1 - 3*2").toInt(), 9);
  EXPECT_EQ(value_of("s0/2").toDouble(), 3.5);
  EXPECT_EQ(value_of("s77/2 < -1 and not s0 == 6").toBool(), true);
  EXPECT_EQ(value_of("1 < s0 <= 7 != 8").toBool(), true);
  EXPECT_EQ(value_of("1 < s0 <= 6").toBool(), false);
  EXPECT_EQ(value_of("2**10 * (s0 - 7)").toInt(), 0);
  EXPECT_EQ(value_of("1.5e1 + 0.5").toDouble(), 15.5);
}

TEST(FormulaTest, ReadsSympysForm) {
  EXPECT_EQ(
      value_of(
          "Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(-1))")
          .toInt(),
      13);
  EXPECT_EQ(
      value_of("FloorDiv(Symbol('s77', integer=True), Integer(2))").toInt(),
      -2);
  EXPECT_EQ(value_of("PythonMod(Symbol('s77'), Integer(2))").toInt(), 1);
  EXPECT_EQ(
      value_of("Max(Integer(3), Symbol('s0'), Symbol('s77'))").toInt(), 7);
  EXPECT_EQ(
      value_of("ModularIndexing(Integer(13), Integer(2), Integer(4))").toInt(),
      2);
  EXPECT_TRUE(value_of("GreaterThan(Symbol('s0'), Integer(7))").toBool());
  EXPECT_EQ(value_of("Float('0.5', precision=53)").toDouble(), 0.5);
  EXPECT_EQ(value_of("Pow(Symbol('s0'), Integer(2))").toInt(), 49);
}

TEST(FormulaTest, ReadsInputs) {
  EXPECT_TRUE(value_of("L['x'].size()[0] <= L['x'].shape[1]").toBool());
  EXPECT_EQ(value_of("L['x'].stride()[0] + L['d']['k'][1]").toInt(), 14);
  EXPECT_EQ(value_of("len(L['x'].shape)").toInt(), 2);
}

TEST(FormulaTest, RefusesWhatItDoesNotKnowByName) {
  const auto refusal = [](const std::string& text) -> std::string {
    try {
      value_of(text);
    } catch (const UnknownFormula& unknown) {
      return unknown.what();
    }
    return "none";
  };
  EXPECT_EQ(refusal("s1 + 1"), "the name \"s1\" is not known");
  EXPECT_EQ(refusal("Zeta(s0)"), "the function \"Zeta\" is not known");
  EXPECT_EQ(refusal("L['y'].size()[0]"), "there is no input \"y\"");
  EXPECT_EQ(
      refusal("L['x'].names()"),
      "the property \"names\" of a tensor is not known");
  EXPECT_EQ(refusal("s0 +"), "a name or a number is expected before \"\"");
  EXPECT_EQ(refusal("(s0"), "\")\" is expected before \"\"");
  EXPECT_EQ(refusal("s0 s0"), "\"s0\" is not expected");
  EXPECT_EQ(refusal("Mod(s0)"), "\"Mod\" has too few arguments");
  EXPECT_EQ(refusal("'s0"), "a string does not end");
  EXPECT_EQ(refusal(std::string(5000, '(')), "it nests too deeply");
  EXPECT_EQ(
      refusal("99999999999999999999"),
      "none"); // a float, as there are no longer ints
}

/// "1+1+1+..."
std::string long_sum(size_t terms) {
  std::string text = "1";
  for (size_t i = 1; i < terms; ++i) {
    text += "+1";
  }
  return text;
}

TEST(FormulaTest, RefusesExpressionsThatAreTooLong) {
  EXPECT_EQ(value_of(long_sum(4000)).toInt(), 4000);
  EXPECT_THAT(
      [] { value_of(long_sum(20000)); },
      ::testing::ThrowsMessage<UnknownFormula>(
          "it has more than 10000 names, numbers and signs"));
}

TEST(FormulaTest, NumbersAtTheEndOf64BitsOverflowNothing) {
  const std::string least = "(-9223372036854775807 - 1)";
  for (const std::string& text : std::vector<std::string>{
           "-" + least,
           "abs(" + least + ")",
           least + " ** 2",
           least + " // -1",
           "LShift(1, -1)",
           "RShift(1, -1)",
           "LShift(1, 64)"}) {
    EXPECT_THROW(value_of(text), c10::Error) << text;
  }
  EXPECT_EQ(value_of("RShift(1, 64)").toInt(), 0);
  EXPECT_EQ(value_of("RShift(-1, 200)").toInt(), -1);
  EXPECT_EQ(value_of(least + " % -1").toInt(), 0);
  for (const char* text :
       {"s0 * 9223372036854775807 / 1",
        "s0 * 900000000000000",
        "s0 * 9000000000000 + 9223372036854775807 - s0"}) {
    (void)Formula::parse(text, kNames).linear();
  }
}

/// Expressions made of random parts, most of them wrong.
TEST(FormulaTest, HostileExpressionsThrowAndDoNothingElse) {
  const std::vector<std::string> parts{
      "s0",
      "s77",
      "(",
      ")",
      "[",
      "]",
      ",",
      "+",
      "-",
      "*",
      "/",
      "//",
      "%",
      "**",
      "<",
      ">=",
      "==",
      "not",
      "and",
      "or",
      "~",
      "&",
      "|",
      "0",
      "1",
      "-1",
      "63",
      "64",
      "9223372036854775807",
      "1e308",
      "0.5",
      "L['x']",
      "L['d']['k'][1]",
      ".size()[0]",
      ".shape[7]",
      ".stride()[1]",
      ".ndim",
      "Mul(",
      "Pow(",
      "FloorDiv(",
      "Mod(",
      "ModularIndexing(",
      "LShift(",
      "RShift(",
      "Where(",
      "Abs(",
      "Max(",
      "RoundToInt(",
      "math.sqrt(",
      "Symbol('s0')",
      "True",
      "None",
      "'",
      "len("};
  std::mt19937 random(7);
  int understood = 0;
  for (int i = 0; i < 30000; ++i) {
    std::string text;
    for (size_t left = random() % 12 + 1; left > 0; --left) {
      text += parts[random() % parts.size()] + " ";
    }
    try {
      (void)value_of(text);
      ++understood;
      const FormulaNames shapes{.symbol = kNames.symbol, .input = {}};
      (void)Formula::parse(text, shapes).linear();
    } catch (const UnknownFormula&) {
    } catch (const c10::Error&) {
    }
  }
  EXPECT_GT(understood, 300);
}

TEST(FormulaTest, SymMaxOfAnIntAndAFloatIsAFloat) {
  const std::vector<c10::IValue> numbers{3, 2.5};
  EXPECT_TRUE(find_node_function("torch.sym_max")(numbers).isDouble());
  EXPECT_TRUE(find_node_function("torch.sym_min")(numbers).isDouble());
  const std::vector<c10::IValue> ints{3, 2};
  EXPECT_TRUE(find_node_function("torch.sym_max")(ints).isInt());
}

/// A program that takes one tensor, `x` in the graph, in forward(**kwargs).
Program with_guard(const std::string& guard) {
  Program program;
  TensorMeta meta;
  meta.sizes.push_back({int64_t{4}});
  program.graph.tensors["x"] = meta;
  program.inputs = {UserInput{{TensorName{"x"}}}};
  TreeSpec keywords;
  keywords.kind = TreeSpec::Kind::Dict;
  keywords.keys = {"ids"};
  keywords.children.resize(1);
  TreeSpec positional;
  positional.kind = TreeSpec::Kind::Tuple;
  ModuleCall root;
  root.inputs.emplace();
  root.inputs->kind = TreeSpec::Kind::Tuple;
  root.inputs->children = {positional, keywords};
  program.module_calls = {root};
  program.guards = {guard};
  return program;
}

TEST(FormulaTest, GuardsNameInputsInThreeWays) {
  const auto args = ExportedArgs().set("ids", torch::ones({4}));
  for (const char* input : {"ids", "kwargs']['ids", "flat_args'][0"}) {
    std::string name = input;
    name = name.ends_with("0") ? "L['" + name + "]" : "L['" + name + "']";
    const auto flatten = [&](const std::string& size) {
      return Signature(with_guard(name + ".size()[0] == " + size))
          .flatten(args, std::nullopt);
    };
    EXPECT_EQ(flatten("4").size(), 1u) << name;
    EXPECT_THROW(flatten("5"), c10::ValueError) << name;
  }
  EXPECT_THROW(
      (void)Signature(with_guard("L['flat_args'][1].size()[0] == 4")),
      RefusedSignature);
}

Program with_node(
    const std::string& target,
    const std::vector<NamedArgument>& inputs) {
  Program program;
  Node& node = program.graph.nodes.emplace_back();
  node.target = "torch.ops.aten." + target;
  node.inputs = inputs;
  return program;
}

TEST(FrozenModeTest, ReadsTheModeOfOperatorsThatCarryNoFlag) {
  const auto fits = [](const Program& program) {
    const FrozenMode mode(program);
    return std::pair(mode.fits(true), mode.fits(false));
  };
  const std::pair only_training(true, false);
  const std::pair only_evaluation(false, true);
  const std::pair both(true, true);
  const NamedArgument mean{
      .name = "running_mean", .argument = {TensorName{"m"}}};
  const NamedArgument none{.name = "running_mean", .argument = {None()}};
  const auto stats = [](bool uses) {
    return NamedArgument{.name = "use_input_stats", .argument = {uses}};
  };
  const auto dropout = [](double p) {
    return NamedArgument{.name = "dropout_p", .argument = {p}};
  };
  EXPECT_EQ(
      fits(with_node("instance_norm.default", {mean, stats(true)})),
      only_training);
  EXPECT_EQ(
      fits(with_node("instance_norm.default", {mean, stats(false)})),
      only_evaluation);
  EXPECT_EQ(
      fits(with_node("instance_norm.default", {none, stats(true)})), both);
  EXPECT_EQ(
      fits(with_node("_batch_norm_with_update.default", {mean})),
      only_training);
  EXPECT_EQ(
      fits(with_node("_batch_norm_with_update_functional.default", {mean})),
      only_training);
  EXPECT_EQ(
      fits(with_node("_batch_norm_no_update.default", {mean})),
      only_evaluation);
  EXPECT_EQ(
      fits(with_node(
          "_scaled_dot_product_flash_attention_for_cpu.default",
          {dropout(0.5)})),
      only_training);
  EXPECT_EQ(
      fits(with_node("scaled_dot_product_attention.default", {dropout(0)})),
      both);
}

TEST(FormulaTest, RefusesNumbersThatAreTooLarge) {
  EXPECT_THROW(value_of("s0**70"), c10::Error);
  EXPECT_THROW(value_of("s0 // (s0 - 7)"), c10::Error);
}

TEST(FormulaTest, KnowsWhatIsLinear) {
  const auto linear = [](const std::string& text) {
    return Formula::parse(text, kNames).linear();
  };
  EXPECT_EQ(linear("2*s77 - 5")->factor, 2);
  EXPECT_EQ(linear("2*s77 - 5")->offset, -5);
  EXPECT_EQ(linear("2*s77 - 5")->symbol, 1u);
  EXPECT_FALSE(linear("s0*s0"));
  EXPECT_FALSE(linear("s0 + s77"));
  EXPECT_FALSE(linear("s0//2"));
  EXPECT_FALSE(linear("Max(5, s0)"));
  EXPECT_FALSE(linear("s0**9"));
  EXPECT_FALSE(linear("4"));
}

} // namespace
} // namespace tessera::exported
