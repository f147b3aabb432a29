// The trainer's corpus with a tokenizer.json, and the flags for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "corpus.h"
#include "examples/tokenizer_files.h"
#include "settings.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<int32_t> tokens_of(const tessera::data::TokenFile& file) {
  std::vector<int64_t> tokens(static_cast<size_t>(file.size()));
  file.read(0, tokens);
  return {tokens.begin(), tokens.end()};
}

Settings parse(std::vector<std::string> words) {
  words.insert(words.begin(), "gpt");
  std::vector<char*> argv;
  for (auto& word : words) {
    argv.push_back(word.data());
  }
  return parse_settings(static_cast<int>(argv.size()), argv.data(), 1, false)
      .value();
}

class TokenizerCorpusTest : public ::testing::Test {
 protected:
  TokenizerCorpusTest() {
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "text");
    fs::copy_file(file_of("llama3"), folder_ / "tokenizer.json");
    std::string text;
    while (text.size() < 200000) { // several stretches, cut inside characters
      text +=
          "Die Straße führt über die Brücke. 你好，世界！ 👩‍👧\n";
    }
    std::ofstream(folder_ / "text" / "a.txt", std::ios::binary) << text;
  }
  ~TokenizerCorpusTest() override {
    fs::remove_all(folder_);
  }

  DataSettings settings() const {
    return {
        .text = folder_ / "text",
        .tokenizer = (folder_ / "tokenizer.json").string()};
  }

  const fs::path folder_ = fs::path(::testing::TempDir()) /
      ("tokenizer_corpus_" + std::to_string(::getpid()));
};

TEST_F(TokenizerCorpusTest, TheTokensAreThoseOfTheFile) {
  EXPECT_THAT(
      prepare_corpus(settings(), folder_ / "data"), HasSubstr("read 1 file,"));
  auto corpus = open_corpus(folder_ / "data");
  auto tokenizer = JsonTokenizer::read(folder_ / "tokenizer.json");
  EXPECT_EQ(corpus.tokenizer.vocabulary(), tokenizer.vocabulary());
  EXPECT_EQ(corpus.train.vocabulary(), tokenizer.vocabulary());
  EXPECT_EQ(
      corpus.tokenizer.encode("Straße 12"), tokenizer.encode("Straße 12"));
  EXPECT_EQ(
      read_text(folder_ / "data" / "tokenizer.json"),
      read_text(folder_ / "tokenizer.json"));
  // No character is cut in two: all tokens are those of whole words.
  const auto text =
      corpus.tokenizer.decode(tokens_of(corpus.validation.value()));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  const auto train = corpus.tokenizer.decode(tokens_of(corpus.train));
  EXPECT_EQ(train.size() + text.size(), fs::file_size(folder_ / "text/a.txt"));
  EXPECT_NE(static_cast<unsigned char>(text.front()) & 0xc0U, 0x80U);
}

TEST_F(TokenizerCorpusTest, RejectsTokensOfAnotherTokenizer) {
  prepare_corpus(settings(), folder_ / "data");
  EXPECT_THAT(
      prepare_corpus(settings(), folder_ / "data"),
      HasSubstr("using the tokens"));
  // The file may be elsewhere, if it is the same.
  auto moved = settings();
  moved.tokenizer = (folder_ / "data" / "tokenizer.json").string();
  EXPECT_THAT(
      prepare_corpus(moved, folder_ / "data"), HasSubstr("using the tokens"));

  std::ofstream(folder_ / "tokenizer.json", std::ios::app) << "\n";
  EXPECT_THAT(
      message_of([&] { prepare_corpus(settings(), folder_ / "data"); }),
      HasSubstr("tokenizer_file was"));
  EXPECT_THAT(
      prepare_corpus(settings(), folder_ / "data", /*is_trained_on=*/true),
      HasSubstr("the tokenizer.json they were made with has changed since"));
  fs::remove(folder_ / "tokenizer.json");
  EXPECT_THAT(
      prepare_corpus(settings(), folder_ / "data"), HasSubstr("is gone"));
  auto bytes = settings();
  bytes.tokenizer = "byte";
  EXPECT_THAT(
      message_of([&] { prepare_corpus(bytes, folder_ / "data"); }),
      HasSubstr("tokenizer was \"tokenizer.json\" and is \"byte\""));
}

TEST_F(TokenizerCorpusTest, RejectsAFileThatIsMissingOrNoTokenizer) {
  auto other = settings();
  other.tokenizer = (folder_ / "nowhere.json").string();
  EXPECT_THAT(
      message_of([&] { prepare_corpus(other, folder_ / "data"); }),
      HasSubstr("nowhere.json"));
  std::ofstream(folder_ / "tokenizer.json") << "{}";
  EXPECT_THAT(
      message_of([&] { prepare_corpus(settings(), folder_ / "data"); }),
      AllOf(HasSubstr("tokenizer.json"), HasSubstr("model is missing")));
  EXPECT_FALSE(fs::exists(folder_ / "data" / "source.json"));
}

TEST_F(TokenizerCorpusTest, TheFlagTakesAPathThatTheRunKeeps) {
  const auto path = (folder_ / "tokenizer.json").string();
  const auto run = (folder_ / "run").string();
  keep_settings(parse({"--run", run, "--tokenizer", path}));
  fs::create_directories(folder_ / "run" / "checkpoints" / "step_00000001");
  EXPECT_EQ(parse({"--run", run}).data.tokenizer, path);
  EXPECT_THAT(
      message_of([&] {
        parse({"--run", run, "--tokenizer", "bpe"});
      }),
      HasSubstr("has --tokenizer " + path));
  EXPECT_THAT(
      message_of([&] {
        parse({"--tokenizer", path, "--vocabulary", "500"});
      }),
      AllOf(HasSubstr("--vocabulary is for --tokenizer bpe"), HasSubstr(path)));
  EXPECT_THAT(
      message_of([&] {
        parse({"--tokenizer", "gpt2"});
      }),
      HasSubstr(
          "takes byte, bpe, none or the path of a tokenizer.json, not \"gpt2\""));
}

} // namespace
} // namespace gpt
