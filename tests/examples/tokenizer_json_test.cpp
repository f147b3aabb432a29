// tokenizer.json files: the same tokens as Hugging Face's package gives
// (tokenizers/make_tokenizer_goldens.py).
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <array>
#include <random>
#include <string>
#include <vector>

#include "examples/tokenizer_files.h"
#include "json_tokenizer.h"
#include "unicode/characters.h"
#include "unicode/nfc.h"

namespace gpt {
namespace {

using nlohmann::json;

constexpr char32_t kBlock = 4096;

const json& goldens() {
  static const auto goldens = json::parse(read_text(file_of("goldens")));
  return goldens;
}

/// CRC-32 of 32-bit numbers, each list followed by a separator.
class Checksum {
 public:
  void add(const std::vector<int32_t>& tokens) {
    for (const int32_t token : tokens) {
      add_number(static_cast<uint32_t>(token));
    }
    add_number(0xffffffffU);
  }
  uint32_t value() const {
    return ~state_;
  }

 private:
  static std::array<uint32_t, 256> make_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < table.size(); ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) {
        value = (value & 1U) != 0 ? value >> 1 ^ 0xedb88320U : value >> 1;
      }
      table[byte] = value;
    }
    return table;
  }
  void add_number(uint32_t number) {
    static const auto table = make_table();
    for (int shift = 0; shift < 32; shift += 8) {
      state_ = table[(state_ ^ number >> shift) & 0xffU] ^ state_ >> 8;
    }
  }

  uint32_t state_ = 0xffffffffU;
};

uint32_t checksum_of(const std::vector<int32_t>& tokens) {
  Checksum checksum;
  checksum.add(tokens);
  return checksum.value();
}

std::vector<int32_t> ids_of(const json& list) {
  return list.get<std::vector<int32_t>>();
}

// ---- The package's tokens ---------------------------------------------------

class TokenizerGoldensTest : public ::testing::TestWithParam<const char*> {
 protected:
  const json& golden() const {
    return goldens().at("tokenizers").at(GetParam());
  }

  JsonTokenizer tokenizer_ = JsonTokenizer::read(file_of(GetParam()));
};

TEST_P(TokenizerGoldensTest, SentencesHaveThePackagesTokens) {
  EXPECT_EQ(tokenizer_.vocabulary(), golden().at("vocabulary"));
  const auto& sentences = goldens().at("sentences");
  for (size_t i = 0; i < sentences.size(); ++i) {
    const auto text = sentences[i].get<std::string>();
    EXPECT_EQ(tokenizer_.encode(text), ids_of(golden().at("sentences")[i]))
        << sentences[i];
  }
  EXPECT_EQ(
      tokenizer_.encode("Hello world", TextEnds::Marked),
      ids_of(golden().at("marked")));
}

TEST_P(TokenizerGoldensTest, RandomTextsHaveThePackagesTokens) {
  const auto& texts = goldens().at("randoms");
  for (size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(
        checksum_of(tokenizer_.encode(texts[i].get<std::string>())),
        golden().at("randoms")[i])
        << texts[i];
  }
}

TEST_P(TokenizerGoldensTest, LongRunsHaveThePackagesTokens) {
  const auto& repeats = goldens().at("repeats");
  for (size_t i = 0; i < repeats.size(); ++i) {
    std::string text;
    for (int times = 0; times < repeats[i][1].get<int>(); ++times) {
      text += repeats[i][0].get<std::string>();
    }
    EXPECT_EQ(checksum_of(tokenizer_.encode(text)), golden().at("repeats")[i])
        << repeats[i];
  }
}

/// Every character alone, and in the planes that have characters, among
/// letters, numbers and spaces.
TEST_P(TokenizerGoldensTest, AllOfUnicodeHasThePackagesTokens) {
  for (char32_t first = 0; first < kNoCharacter; first += kBlock) {
    Checksum checksum;
    std::string among;
    const char32_t plane = first >> 16;
    for (char32_t code = first; code < first + kBlock; ++code) {
      if (code >= 0xd800 && code < 0xe000) {
        continue; // surrogates are no characters
      }
      std::string c;
      append_character(c, code);
      checksum.add(tokenizer_.encode(c));
      if (plane < 4 || plane == 14) {
        among += c + " a" + c + "b A" + c + "B1" + c + "2 " + c + c + "s\n";
      }
    }
    checksum.add(tokenizer_.encode(among));
    EXPECT_EQ(checksum.value(), golden().at("blocks")[first / kBlock])
        << std::hex << static_cast<uint32_t>(first);
  }
}

/// Marks change places when text is normalized.
TEST(JsonTokenizerTest, MarksInAnyOrderHaveThePackagesTokens) {
  auto tokenizer = JsonTokenizer::read(file_of("qwen2"));
  Checksum checksum;
  for (char32_t code = 0x300; code < 0x20000; ++code) {
    if (code >= 0xd800 && code < 0xe000) {
      continue;
    }
    std::string c;
    append_character(c, code);
    checksum.add(tokenizer.encode("q" + c + "\u0334q\u0345" + c + "\u0301"));
  }
  EXPECT_EQ(checksum.value(), goldens().at("marks"));
}

INSTANTIATE_TEST_SUITE_P(
    Json,
    TokenizerGoldensTest,
    ::testing::Values(
        "gpt2",
        "unknown",
        "unknown_fused",
        "llama3",
        "qwen2",
        "qwen35",
        "o200k",
        "tekken",
        "twice"),
    [](const auto& tokenizer) { return std::string(tokenizer.param); });

// ---- Text that comes back ---------------------------------------------------

TEST(JsonTokenizerTest, EveryTextComesBack) {
  for (const auto* name : {"gpt2", "llama3", "qwen35", "o200k"}) {
    auto tokenizer = JsonTokenizer::read(file_of(name));
    for (const auto* kind : {"sentences", "randoms"}) {
      for (const auto& text : goldens().at(kind)) {
        const auto bytes = text.get<std::string>();
        EXPECT_EQ(tokenizer.decode(tokenizer.encode(bytes)), bytes);
      }
    }
  }
}

TEST(JsonTokenizerTest, BytesThatAreNotUtf8ComeBack) {
  std::mt19937 numbers(7);
  for (const auto* name : {"gpt2", "llama3", "qwen35", "o200k"}) {
    auto tokenizer = JsonTokenizer::read(file_of(name));
    for (const std::string bad :
         {"\xff",
          "a\x80"
          "b",
          "\xc0\xaf",
          "\xed\xa0\x80",
          "\xf4\x90\x80\x80",
          "caf\xe9 \xe9t\xe9",
          "\xe4\xbd",
          "\xf0\x9f\x91"}) {
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(bad)), bad);
    }
    for (int i = 0; i < 300; ++i) {
      std::string text(numbers() % 40, '\0');
      for (char& byte : text) {
        byte = static_cast<char>(numbers());
      }
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
      EXPECT_EQ(to_nfc(to_nfc(text)), to_nfc(text));
    }
  }
}

TEST(JsonTokenizerTest, ANormalizedTextComesBackNormalized) {
  auto tokenizer = JsonTokenizer::read(file_of("qwen2"));
  EXPECT_EQ(
      tokenizer.decode(tokenizer.encode("cafe\u0301 \u1112\u1161\u11ab")),
      "caf\u00e9 \ud55c");
  // A token that takes the spaces around it does not give them back.
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a <left>b")), "a<left>b");
}

TEST(JsonTokenizerTest, ALongWordIsOneOfManyTokens) {
  auto tokenizer = JsonTokenizer::read(file_of("gpt2"));
  std::string word;
  std::mt19937 numbers(3);
  while (word.size() < 1000000) {
    word += static_cast<char>('a' + numbers() % 26);
  }
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(word)), word);
}

TEST(JsonTokenizerTest, RejectsTokensThatDoNotExist) {
  const auto tokenizer = JsonTokenizer::read(file_of("gpt2"));
  for (const int32_t token : {-1, 480, 1 << 30}) {
    EXPECT_THROW(
        (void)tokenizer.decode(std::vector<int32_t>{token}), std::out_of_range);
  }
}

} // namespace
} // namespace gpt
