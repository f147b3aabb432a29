// Expressions of sizes, as numbers.
#include "exported/format/size_expression.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::exported {
namespace {

using ::testing::HasSubstr;

int64_t value_of(const std::string& text, const SymbolValues& symbols = {}) {
  return evaluate({.value = text}, symbols);
}

std::string refusal_of(
    const std::string& text,
    const SymbolValues& symbols = {}) {
  try {
    return std::to_string(value_of(text, symbols));
  } catch (const UnknownSize& error) {
    return error.what();
  }
}

const SymbolValues kSymbols{{"s1", 7}, {"s20", 12}};

TEST(SizeExpressionTest, KnowsTheArithmeticOfShapes) {
  EXPECT_EQ(evaluate({.value = int64_t{5}}, {}), 5);
  EXPECT_EQ(value_of("Symbol('s1', positive=True, integer=True)", kSymbols), 7);
  EXPECT_EQ(
      value_of(
          "Add(Mul(Integer(2), Symbol('s1', integer=True)), Integer(-3))",
          kSymbols),
      11);
  EXPECT_EQ(value_of("Mul(Symbol('s1'), Symbol('s20'))", kSymbols), 84);
  EXPECT_EQ(value_of("Pow(Symbol('s1'), Integer(2))", kSymbols), 49);
  EXPECT_EQ(value_of("FloorDiv(Symbol('s20'), Integer(5))", kSymbols), 2);
  EXPECT_EQ(value_of("FloorDiv(Integer(-3), Integer(2))"), -2);
  EXPECT_EQ(value_of("Mod(Integer(-3), Integer(2))"), 1);
  EXPECT_EQ(
      value_of("Max(Integer(1), Min(Symbol('s1'), Symbol('s20')))", kSymbols),
      7);
}

TEST(SizeExpressionTest, RefusesWhatItCannotCompute) {
  EXPECT_THAT(
      refusal_of("Symbol('u0')", kSymbols),
      HasSubstr("a size depends on u0, which is not known"));
  EXPECT_THAT(
      refusal_of("Sin(Integer(1))"),
      HasSubstr("the expression \"Sin(Integer(1))\" is not understood"));
  for (const char* text :
       {"",
        "Add(",
        "Add(Integer(1)",
        "Add(Integer(1)) 2",
        "Integer(1, 2)",
        "FloorDiv(Integer(1))",
        "Symbol(s1)",
        "Symbol('s1'",
        "Integer(99999999999999999999)"}) {
    EXPECT_THAT(refusal_of(text, kSymbols), HasSubstr("is not understood"))
        << text;
  }
  EXPECT_THAT(
      refusal_of("FloorDiv(Integer(1), Integer(0))"),
      HasSubstr("divided by 0"));
  EXPECT_THAT(
      refusal_of("Mul(Integer(9223372036854775807), Integer(2))"),
      HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(
      refusal_of("Pow(Integer(2), Integer(1000000000000))"),
      HasSubstr("exponent 1000000000000"));
  std::string deep = "Integer(1)";
  for (int i = 0; i < 1000; ++i) {
    deep = "Add(" + deep + ")";
  }
  EXPECT_THAT(refusal_of(deep), HasSubstr("nested too deeply"));
}

TEST(SizeExpressionTest, ASymbolIsKnownByItsName) {
  EXPECT_EQ(symbol_of({.value = "Symbol('s77', integer=True)"}), "s77");
  EXPECT_EQ(symbol_of({.value = int64_t{3}}), std::nullopt);
  EXPECT_EQ(
      symbol_of({.value = "Mul(Integer(2), Symbol('s77'))"}), std::nullopt);
}

} // namespace
} // namespace tessera::exported
