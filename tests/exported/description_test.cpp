// What an exported model says about its inputs and results.
#include <tessera/exported/exported.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "exported/cases.h"

namespace tessera {
namespace {

using ExportedDescriptionTest = testing::ExportedCases;

using ::testing::ElementsAre;
using testing::exported_case;
using ::testing::ThrowsMessage;

/// "ids: Long [2..16, 7]"; numbers have no dtype.
std::vector<std::string> in_words(const std::vector<ExportedSpec>& specs) {
  std::vector<std::string> words;
  for (const auto& spec : specs) {
    std::ostringstream text;
    text << spec.name << ":";
    if (spec.kind == ExportedValue::Kind::Int) {
      text << " int";
    } else {
      text << " " << c10::toString(spec.dtype);
      for (const auto& size : spec.sizes) {
        text << " " << size.least;
        if (!size.is_fixed()) {
          text << "..";
          size.contains(1 << 30) ? text << "any" : text << size.most;
        }
      }
    }
    words.push_back(text.str());
  }
  return words;
}

TEST_F(ExportedDescriptionTest, SizesAreNumbersOrRanges) {
  const auto model = load_exported(exported_case("rotary_dynamic"));
  EXPECT_EQ(
      in_words(model->inputs()),
      std::vector<std::string>{"ids: Long 2..16 2..16"});
  const auto fixed = load_exported(exported_case("rotary"));
  EXPECT_EQ(
      in_words(fixed->inputs()), std::vector<std::string>{"ids: Long 3 7"});
  EXPECT_TRUE(fixed->inputs()[0].sizes[1].is_fixed());
  EXPECT_FALSE(fixed->inputs()[0].sizes[1].contains(8));
}

TEST_F(ExportedDescriptionTest, SizesOfOneSymbolFollowFromItsRange) {
  const auto model = load_exported(exported_case("symbolic"));
  const auto inputs = in_words(model->inputs());
  ASSERT_EQ(inputs.size(), 3u);
  EXPECT_EQ(inputs[0], "x: Float 2..16 4");
  EXPECT_EQ(inputs[1], "doubled: Float 4..32 2");
  EXPECT_EQ(inputs[2], "count: int");
  EXPECT_THAT(
      in_words(model->results()),
      ElementsAre("0: Float 2..16 4", "1: Float", "2: Float"));
}

TEST_F(ExportedDescriptionTest, NamesSayWhereAValueIs) {
  const auto model = load_exported(exported_case("forms"));
  EXPECT_THAT(
      in_words(model->inputs()), // numbers and texts were fixed at export
      ElementsAre(
          "x: Float 4 3",
          "pair[0]: Float 3",
          "pair[1]: Bool 4 3",
          "options['bias']['inner'][0]: Float 3"));
  EXPECT_THAT(
      in_words(model->results()),
      ElementsAre(
          "y: Float 4 3", "parts[0]: Bool 4 3", "parts[1][0]: Float 4"));
  const auto plain = load_exported(exported_case("mlp"));
  EXPECT_EQ(plain->results()[0].name, "");
}

TEST_F(ExportedDescriptionTest, AModeThatTheFileLacksIsRefused) {
  auto model = load_exported(exported_case("dropout"));
  EXPECT_NO_THROW(model->inputs());
  model->eval();
  EXPECT_THAT(
      [&] { model->results(); },
      ThrowsMessage<c10::ValueError>(
          ::testing::HasSubstr("the model is in evaluation mode")));
}

} // namespace
} // namespace tessera
