// What is refused of tokenizer.json files, and how it is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <functional>
#include <random>
#include <string>

#include "examples/tokenizer_files.h"
#include "json_tokenizer.h"

namespace gpt {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

/// What reading the file says after `change`.
std::string refusal(const std::function<void(json&)>& change) {
  auto file = json::parse(read_text(file_of("llama3")));
  change(file);
  return message_of([&] { JsonTokenizer::parse(file.dump(), "t.json"); });
}

/// The same with a value set at a place.
std::string refusal(const std::string& place, const json& value) {
  return refusal([&](json& file) { file[json::json_pointer(place)] = value; });
}

TEST(TokenizerFileTest, RejectsOtherModelsByName) {
  EXPECT_THAT(
      refusal("/model/type", "WordPiece"),
      AllOf(
          HasSubstr("\"t.json\" is not a tokenizer.json that is supported"),
          HasSubstr("model.type is \"WordPiece\", but only \"BPE\"")));
  EXPECT_THAT(
      refusal("/model/byte_fallback", true),
      HasSubstr("model.byte_fallback is true"));
  EXPECT_THAT(refusal("/model/dropout", 0.1), HasSubstr("model.dropout is"));
  EXPECT_THAT(
      refusal("/model/end_of_word_suffix", "</w>"),
      HasSubstr("model.end_of_word_suffix is \"</w>\""));
  EXPECT_THAT(
      refusal("/model/unk_token", "<none>"),
      HasSubstr("model.unk_token needs the token \"<none>\""));
  EXPECT_THAT(
      refusal("/model/magic", 3),
      HasSubstr("model.magic is 3, and a field of that name"));
}

TEST(TokenizerFileTest, RejectsOtherStepsByName) {
  EXPECT_THAT(
      refusal("/normalizer", {{"type", "Lowercase"}}),
      HasSubstr("normalizer.type is \"Lowercase\""));
  EXPECT_THAT(
      refusal("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\w+"),
      AllOf(
          HasSubstr("pre_tokenizer.pretokenizers[0].pattern.Regex is "
                    "\"\\\\w+\""),
          HasSubstr("Llama 3, Qwen2")));
  EXPECT_THAT(
      refusal("/pre_tokenizer/pretokenizers/0/behavior", "Removed"),
      HasSubstr("pretokenizers[0].behavior is \"Removed\""));
  EXPECT_THAT(
      refusal("/pre_tokenizer/pretokenizers/1/type", "Metaspace"),
      HasSubstr("pretokenizers[1].type is \"Metaspace\""));
  EXPECT_THAT(
      refusal(
          [](json& file) { file["pre_tokenizer"]["pretokenizers"].erase(1); }),
      HasSubstr("does not end with ByteLevel"));
  EXPECT_THAT(
      refusal([](json& file) {
        auto& list = file["pre_tokenizer"]["pretokenizers"];
        list.push_back(list[0]);
      }),
      HasSubstr("pretokenizers[2] follows ByteLevel"));
  EXPECT_THAT(
      refusal("/pre_tokenizer", nullptr),
      HasSubstr("pre_tokenizer is missing"));
  EXPECT_THAT(
      refusal("/decoder/type", "Metaspace"),
      HasSubstr("decoder.type is \"Metaspace\""));
  EXPECT_THAT(
      refusal("/post_processor/processors/1/type", "RobertaProcessing"),
      HasSubstr("processors[1].type is \"RobertaProcessing\""));
  EXPECT_THAT(
      refusal("/truncation", {{"max_length", 8}}), HasSubstr("truncation is"));
  EXPECT_THAT(refusal("/version", "2.0"), HasSubstr("version is \"2.0\""));
  EXPECT_THAT(refusal("/novelty", 1), HasSubstr("novelty is 1"));
}

TEST(TokenizerFileTest, RejectsAddedTokensThatWouldNotBeTheSame) {
  EXPECT_THAT(
      refusal("/added_tokens/1/single_word", true),
      HasSubstr("added_tokens[1].single_word is true"));
  EXPECT_THAT(
      refusal("/added_tokens/1/id", 7), HasSubstr("added_tokens[1].id is 7"));
  EXPECT_THAT(
      refusal("/added_tokens/1/content", ""), HasSubstr("without content"));
  EXPECT_THAT(
      refusal("/added_tokens/2/content", "<|begin|>"),
      HasSubstr("as is that of another one"));
  EXPECT_THAT(
      refusal("/added_tokens/2/content", std::string(2000, 'x')),
      HasSubstr("more than 1024 bytes"));
  EXPECT_THAT(
      refusal(
          "/post_processor/processors/1/special_tokens/<|begin|>/ids/0", 99999),
      HasSubstr("the number 99999, which no token has"));
}

TEST(TokenizerFileTest, RejectsVocabulariesThatContradictThemselves) {
  EXPECT_THAT(
      refusal([](json& file) {
        file["model"]["vocab"]["abracadabra"] = 5; // another one's
      }),
      HasSubstr("have the same number 5"));
  for (const json& id :
       {json(-1),
        json(1 << 20),
        json(1.5),
        json("7"),
        json(18446744073709551615U)}) {
    EXPECT_THAT(
        refusal("/model/vocab/twin", id),
        HasSubstr("not a whole number from 0 to 1048575"));
  }
  EXPECT_THAT(
      refusal("/model/merges/3", json::array({"e", "seen"})),
      HasSubstr("model.merges[3] needs the token \"seen\""));
  EXPECT_THAT(
      refusal("/model/merges/3", "a b c"),
      HasSubstr("model.merges[3] is \"a b c\", not two tokens"));
  EXPECT_THAT(
      refusal("/model/vocab", json::object()), HasSubstr("model.vocab"));
}

TEST(TokenizerFileTest, RejectsFilesThatAreSomethingElse) {
  const auto says = [](const std::string& text) {
    return message_of([&] { JsonTokenizer::parse(text, "t.json"); });
  };
  EXPECT_THAT(says(""), HasSubstr("it is not JSON"));
  EXPECT_THAT(says("[]"), HasSubstr("the file is [], not an object"));
  EXPECT_THAT(says("{\"model\": \"\xff\"}"), HasSubstr("it is not JSON"));
  EXPECT_THAT(
      says(R"({"model": {"vocab": {"a": 1, "a": 2}}})"),
      HasSubstr("it has the name \"a\" twice"));
  EXPECT_THAT(says(std::string(100000, '[')), HasSubstr("deeper than"));
  EXPECT_THAT(
      message_of([] { JsonTokenizer::read("/nowhere/tokenizer.json"); }),
      HasSubstr("/nowhere/tokenizer.json"));
}

/// A byte without a token is an error when it is met, not a hole in the text.
TEST(TokenizerFileTest, RejectsTextWithAByteThatHasNoToken) {
  auto file = json::parse(read_text(file_of("unknown")));
  file["model"]["unk_token"] = nullptr;
  auto tokenizer = JsonTokenizer::parse(file.dump(), "t.json");
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(" the")), " the");
  EXPECT_THAT(
      message_of([&] { tokenizer.encode("a\xffz"); }),
      AllOf(HasSubstr("t.json"), HasSubstr("0xFF"), HasSubstr("unk_token")));
}

TEST(TokenizerFileTest, SurvivesDamagedFiles) {
  const auto whole = read_text(file_of("qwen2"));
  std::mt19937 numbers(11);
  int accepted = 0;
  for (int i = 0; i < 400; ++i) {
    auto text = whole;
    for (unsigned times = 1 + numbers() % 3; times > 0; --times) {
      const size_t at = numbers() % text.size();
      switch (numbers() % 4) {
        case 0:
          text[at] = static_cast<char>(numbers());
          break;
        case 1:
          text.erase(at, 1 + numbers() % 20);
          break;
        case 2:
          text.insert(at, text.substr(numbers() % text.size(), 8));
          break;
        default:
          text[at] = static_cast<char>('0' + numbers() % 10);
      }
    }
    try {
      auto tokenizer = JsonTokenizer::parse(text, "t.json");
      ++accepted;
      (void)tokenizer.decode(tokenizer.encode("the w\u00f6rd <left> 17\n"));
    } catch (const std::runtime_error& error) {
      EXPECT_THAT(error.what(), HasSubstr("t.json"));
    }
  }
  EXPECT_GT(accepted, 0);
}

} // namespace
} // namespace gpt
