// Expressions of sizes and inputs.
#include "exported/formula.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
