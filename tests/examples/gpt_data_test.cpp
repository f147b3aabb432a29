// The trainer's settings and data, without ranks.
#include <tessera/data/token_windows.h>

#include <rapidcheck.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <map>

#include "corpus.h"
#include "settings.h"
#include "tokenizer.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class GptDataTest : public ::testing::Test {
 protected:
  GptDataTest() {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~GptDataTest() override {
    fs::remove_all(folder_);
  }

  fs::path write(const std::string& name, const std::string& text) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }

  const fs::path folder_ = fs::path(::testing::TempDir()) /
      ("gpt_data_" + std::to_string(::getpid()));
};

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(nothing was thrown)";
}

Settings parse(std::vector<std::string> words, int num_ranks = 2) {
  words.insert(words.begin(), "gpt");
  std::vector<char*> argv;
  for (auto& word : words) {
    argv.push_back(word.data());
  }
  return parse_settings(
             static_cast<int>(argv.size()), argv.data(), num_ranks, false)
      .value();
}

// ---- Tokenizer --------------------------------------------------------------

TEST_F(GptDataTest, EveryTextComesBack) {
  const std::string learned_from =
      "the cat sat on the mat; the hat sat on the cat\n\n  int64_t x = 17;";
  auto tokenizer = Tokenizer::learn(learned_from, 300);
  EXPECT_GT(tokenizer.vocabulary(), 256);
  EXPECT_LT(std::ssize(tokenizer.encode(learned_from)), learned_from.size());
  EXPECT_TRUE(rc::check([&](const std::string& text) {
    RC_ASSERT(tokenizer.decode(tokenizer.encode(text)) == text);
    RC_ASSERT(Tokenizer().decode(Tokenizer().encode(text)) == text);
  }));
}

TEST_F(GptDataTest, FrequentPairsAreLearnedFirst) {
  auto tokenizer = Tokenizer::learn("ababab abab xyxy", 258);
  EXPECT_THAT(tokenizer.encode("ab"), ElementsAre(256));
  EXPECT_THAT(tokenizer.encode("abab"), ElementsAre(257));
  EXPECT_THAT(tokenizer.encode("xy"), ElementsAre('x', 'y'));
}

TEST_F(GptDataTest, TokensEndWithTheirWord) {
  EXPECT_THAT(
      words_of("a bc  d;\n"), ElementsAre("a", " bc", " ", " d", ";", "\n"));
  EXPECT_TRUE(rc::check([](const std::string& text) {
    std::string joined;
    for (const auto word : words_of(text)) {
      RC_ASSERT(!word.empty());
      joined += word;
    }
    RC_ASSERT(joined == text);
  }));
}

TEST_F(GptDataTest, ATokenizerSurvivesItsFile) {
  auto tokenizer = Tokenizer::learn("banana bandana banana", 270);
  tokenizer.save(folder_ / "t.json");
  auto loaded = Tokenizer::load(folder_ / "t.json");
  EXPECT_EQ(loaded.vocabulary(), tokenizer.vocabulary());
  EXPECT_EQ(loaded.encode("bananas"), tokenizer.encode("bananas"));
}

TEST_F(GptDataTest, RejectsATokenizerThatRefersToWhatIsNotThere) {
  const auto path = write("t.json", R"({"tokenizer":1,"merges":[[97,400]]})");
  EXPECT_THAT(
      message_of([&] { Tokenizer::load(path); }),
      AllOf(HasSubstr("t.json"), HasSubstr("token 400")));
  EXPECT_THAT(
      message_of([&] { Tokenizer::load(write("u.json", "{")); }),
      HasSubstr("is not a tokenizer"));
}

// ---- Corpus -----------------------------------------------------------------

TEST_F(GptDataTest, ACorpusIsMadeOnceFromTextAlone) {
  write("text/b.txt", "second ");
  write("text/a.txt", "first ");
  write("text/deep/c.txt", "third ");
  write("text/image.bin", std::string("\0\1\2", 3));
  const DataSettings settings{.text = folder_ / "text", .validation = 0.5};
  EXPECT_THAT(
      prepare_corpus(settings, folder_ / "data"), HasSubstr("read 3 files"));
  EXPECT_THAT(
      prepare_corpus(settings, folder_ / "data"),
      HasSubstr("using the tokens"));
  const auto corpus = open_corpus(folder_ / "data");
  EXPECT_EQ(corpus.tokenizer.vocabulary(), 256);
  EXPECT_GT(corpus.train.size(), 0);
}

TEST_F(GptDataTest, TokensAreInTheFormatOfTheLibrary) {
  const auto text = write("a.txt", "abcdefgh");
  prepare_corpus({.text = text, .validation = 0.5}, folder_ / "data");
  std::ifstream file(folder_ / "data" / "train.tokens", std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  // docs/formats/token-file.md: so are the corpora of earlier versions.
  EXPECT_EQ(
      bytes,
      std::string("TESSTOK1\2\0\0\0\0\1\0\0\4\0\0\0\0\0\0\0", 24) +
          std::string("a\0b\0c\0d\0", 8));
  const tessera::data::TokenWindows windows(
      open_corpus(folder_ / "data").train, 3);
  EXPECT_TRUE(torch::equal(
      windows.get(0).targets, torch::tensor({'b', 'c', 'd'}, torch::kLong)));
}

TEST_F(GptDataTest, RejectsTokensThatAreDamaged) {
  const auto text = write("a.txt", std::string(1000, 'a'));
  prepare_corpus({.text = text}, folder_ / "data");
  fs::resize_file(folder_ / "data" / "train.tokens", 100);
  EXPECT_THAT(
      message_of([&] { open_corpus(folder_ / "data"); }),
      AllOf(
          HasSubstr("train.tokens"),
          HasSubstr("Remove \"" + (folder_ / "data").string() + "\"")));
}

TEST_F(GptDataTest, RejectsTokensThatWereMadeFromSomethingElse) {
  write("text/a.txt", std::string(1000, 'a'));
  DataSettings settings{.text = folder_ / "text"};
  prepare_corpus(settings, folder_ / "data");
  settings.tokenizer = "bpe";
  EXPECT_THAT(
      message_of([&] { prepare_corpus(settings, folder_ / "data"); }),
      AllOf(HasSubstr("tokenizer was \"byte\" and is \"bpe\"")));
}

TEST_F(GptDataTest, NoticesTextThatWasAdded) {
  write("text/a.txt", std::string(1000, 'a'));
  const DataSettings settings{.text = folder_ / "text"};
  prepare_corpus(settings, folder_ / "data");
  write("text/b.txt", "more");
  EXPECT_THAT(
      message_of([&] { prepare_corpus(settings, folder_ / "data"); }),
      HasSubstr("extent was"));
  EXPECT_THAT( // a run that began with them continues
      prepare_corpus(settings, folder_ / "data", /*is_trained_on=*/true),
      HasSubstr("has changed since"));
  fs::remove_all(folder_ / "text"); // the tokens are enough
  EXPECT_THAT(
      prepare_corpus(settings, folder_ / "data"),
      HasSubstr("using the tokens"));
}

TEST_F(GptDataTest, ARunBelowItsTextIsNoText) {
  write("text/a.txt", std::string(1000, 'a'));
  const auto run = folder_ / "text" / "runs" / "gpt";
  auto settings =
      parse({"--text", (folder_ / "text").string(), "--run", run.string()})
          .data;
  prepare_corpus(settings, run / "data");
  write("text/runs/gpt/log.jsonl", "a line");
  EXPECT_THAT(
      prepare_corpus(settings, run / "data"), HasSubstr("using the tokens"));
  settings.left_out.clear();
  EXPECT_THAT(
      message_of([&] { prepare_corpus(settings, run / "data"); }),
      HasSubstr("extent was"));
}

TEST_F(GptDataTest, OfSeveralThatAskForTokensOneMakesThem) {
  write("text/a.txt", std::string(3000000, 'a'));
  const DataSettings settings{.text = folder_ / "text"};
  std::vector<std::future<std::string>> asked;
  for (int i = 0; i < 4; ++i) {
    asked.push_back(std::async(std::launch::async, [&] {
      return prepare_corpus(settings, folder_ / "data");
    }));
  }
  int made = 0;
  for (auto& answer : asked) {
    made += answer.get().starts_with("read 1 file,") ? 1 : 0;
  }
  EXPECT_EQ(made, 1);
}

TEST_F(GptDataTest, RejectsAFolderWithoutText) {
  fs::create_directories(folder_ / "empty");
  for (const auto* name : {"empty", "nowhere"}) {
    EXPECT_THAT(
        message_of([&] {
          prepare_corpus({.text = folder_ / name}, folder_ / "data");
        }),
        HasSubstr(name));
  }
}

// ---- Settings ---------------------------------------------------------------

TEST_F(GptDataTest, FlagsWinOverTheFileAndTheFileOverDefaults) {
  const auto toml = write(
      "s.toml",
      "seed = 3 # three\n# prompt = \"no\"\nprompt = \"#include\" # yes\n"
      "[model]\nwidth = 64\n[training]\nmicro_batch = 2\nlr = 5e-4\n"
      "[parallel]\nrecompute = true\nstrategy = \"zero\"\n");
  const auto settings =
      parse({"--config", toml.string(), "--lr", "1e-2", "--steps", "7"});
  EXPECT_EQ(settings.seed, 3);
  EXPECT_EQ(settings.prompt, "#include");
  EXPECT_EQ(settings.model.width, 64);
  EXPECT_EQ(settings.lr, 1e-2);
  EXPECT_EQ(settings.steps, 7);
  EXPECT_TRUE(settings.recompute);
  EXPECT_EQ(settings.strategy, Strategy::Zero);
  EXPECT_EQ(settings.model.layers, GptConfig().layers);
  EXPECT_EQ(settings.rows(2), 2);
  EXPECT_EQ(settings.accumulation(2), 4);
  EXPECT_THAT(
      settings.json,
      AllOf(
          HasSubstr("\"width\":64"),
          HasSubstr("\"strategy\":\"zero\""),
          HasSubstr("\"offload\":false"),
          HasSubstr("\"recompute\":true")));
}

TEST_F(GptDataTest, JsonSaysTheSame) {
  const auto file = write(
      "s.json",
      R"({"model": {"width": 64, "dropout": 0.1}, "prompt": "int main",
          "recompute": true})");
  const auto settings = parse({"--config", file.string()});
  EXPECT_EQ(settings.model.width, 64);
  EXPECT_EQ(settings.model.dropout, 0.1);
  EXPECT_EQ(settings.prompt, "int main");
  EXPECT_TRUE(settings.recompute);
}

TEST_F(GptDataTest, ARunKeepsWhatItWasBegunWith) {
  const auto run = (folder_ / "run").string();
  // Without a checkpoint nothing depends on them.
  keep_settings(parse({"--run", run, "--width", "16"}));
  keep_settings(parse({"--run", run, "--width", "64", "--seed", "3"}));
  fs::create_directories(folder_ / "run" / "checkpoints" / "step_00000001");
  const auto again = parse({"--run", run, "--lr", "1e-2"});
  EXPECT_EQ(again.model.width, 64);
  EXPECT_EQ(again.seed, 3);
  EXPECT_THAT(again.json, HasSubstr("\"width\":64"));
  EXPECT_EQ(parse({"--run", run, "--width", "64"}).model.width, 64);
  EXPECT_THAT(
      message_of([&] {
        parse({"--run", run, "--width", "32"});
      }),
      HasSubstr("has --width 64, not 32"));
}

TEST_F(GptDataTest, ARunKeepsWhereItsTokensAre) {
  const auto run = (folder_ / "run").string();
  const auto begin = [&](const std::vector<std::string>& more) {
    fs::remove_all(run);
    std::vector<std::string> words{"--run", run, "--tokenizer", "bpe"};
    words.insert(words.end(), more.begin(), more.end());
    keep_settings(parse(words));
    fs::create_directories(fs::path(run) / "checkpoints" / "step_00000001");
  };
  begin({"--data", (folder_ / "tokens").string()});
  EXPECT_EQ(parse({"--run", run}).tokens_folder(), folder_ / "tokens");
  EXPECT_EQ(
      parse({"--run", run, "--vocabulary", "1024"}).data.vocabulary, 1024);
  begin({}); // with the run, which may be moved
  fs::rename(run, folder_ / "moved");
  EXPECT_EQ(
      parse({"--run", (folder_ / "moved").string()}).tokens_folder(),
      folder_ / "moved" / "data");
}

TEST_F(GptDataTest, WhatIsNotUtf8IsDescribedAllTheSame) {
  EXPECT_THAT(
      parse({"--prompt",
             "\xe4"
             "bc"})
          .json,
      HasSubstr("\xEF\xBF\xBD"
                "bc"));
}

TEST_F(GptDataTest, SettingsKeptByAnotherHandAreNamed) {
  const auto run = (folder_ / "run").string();
  write("run/settings.json", R"({"width": "wide"})");
  fs::create_directories(folder_ / "run" / "checkpoints" / "step_00000001");
  EXPECT_THAT(
      message_of([&] {
        parse({"--run", run});
      }),
      AllOf(HasSubstr("settings.json"), HasSubstr("wide for \"width\"")));
}

TEST_F(GptDataTest, EvaluationTakesAnyNumberOfRanks) {
  EXPECT_THAT(
      message_of([] {
        parse({"--batch", "16"}, 3);
      }),
      HasSubstr("Try --batch 15"));
  EXPECT_EQ(parse({"--mode", "eval"}, 3).rows(3), 5);
  EXPECT_EQ(parse({"--mode", "eval"}, 40).rows(40), 1);
}

TEST_F(GptDataTest, RejectsUnknownNamesAndSaysTheNearest) {
  EXPECT_THAT(
      message_of([] {
        parse({"--widht", "64"});
      }),
      AllOf(HasSubstr("--widht"), HasSubstr("--width meant")));
  for (const auto& file :
       {write("a.toml", "[model]\nlayres = 3\n"),
        write("a.json", R"({"layres": 3})")}) {
    EXPECT_THAT(
        message_of([&] {
          parse({"--config", file.string()});
        }),
        AllOf(HasSubstr("layres"), HasSubstr("\"layers\" meant")));
  }
  EXPECT_THAT(
      message_of([&] {
        parse({"--config", write("b.toml", "[data]\nwidth = 3\n").string()});
      }),
      HasSubstr("belongs to [model]"));
  for (const char* text : {"layers = [1, 2]\n", "layers = 1\nlayers = 3\n"}) {
    EXPECT_THAT(
        message_of([&] {
          parse({"--config", write("c.toml", text).string()});
        }),
        HasSubstr("several values"));
  }
  EXPECT_THAT(
      message_of([&] {
        parse({"--config", write("d.toml", "prompt = \"a\\n\"\n").string()});
      }),
      HasSubstr("escape"));
  for (const auto& [text, why] : std::map<std::string, std::string>{
           {"prompt = \"a\n", "a quote that does not end"},
           {"[1,2]\n", "section [1,2]"},
           {R"({"width": 16, "width": 32})", "several values for \"width\""}}) {
    EXPECT_THAT(
        message_of([&, &name = text] {
          parse({"--config", write("e.toml", name).string()});
        }),
        HasSubstr(why));
  }
}

TEST_F(GptDataTest, RejectsWhatMakesNoSense) {
  const auto rejects = [](const std::vector<std::string>& words,
                          const std::string& why) {
    EXPECT_THAT(message_of([&] { parse(words); }), HasSubstr(why));
  };
  rejects({"--width", "130"}, "--heads 4");
  rejects({"--batch", "7"}, "2 ranks");
  rejects({"--batch", "1"}, "Try --batch 2");
  rejects({"--micro-batch", "5"}, "--micro-batch 5. Try --batch 10");
  rejects({"--steps", "many"}, "takes a whole number, 0 or more, not \"many\"");
  rejects({"--steps", "99999999999999999999"}, "whole number");
  rejects({"--layers", "0"}, "1 or more");
  rejects({"--lr", "nan"}, "above 0");
  rejects({"--trace", "5"}, "10-12");
  rejects({"--strategy", "magic"}, "magic");
  rejects({"--top-p", "0"}, "above 0, 1 at most");
  rejects({"--top-p", "1.5"}, "above 0, 1 at most");
  rejects({"--top-k", "-1"}, "0 or more");
  rejects({"--keep-best", "--eval-every", "0"}, "--keep-best needs");
  rejects({"--keep-best", "--checkpoint-every", "0"}, "--keep-best needs");
  rejects({"--from", "best"}, "--mode eval and sample");
  rejects({"--strategy", "ddp", "--offload"}, "fsdp");
  rejects({"--vocabulary", "500"}, "bpe");
  rejects({"--min-lr", "1"}, "above --lr");
  rejects({"--text-bytes", "-5"}, "--text-bytes");
  rejects({"--config", "/nowhere.toml"}, "nowhere.toml");
  rejects({"12"}, "all settings are flags");
}

} // namespace
} // namespace gpt
