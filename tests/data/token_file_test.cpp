// Token files, whole and damaged, and windows in them.
#include <tessera/data/loader.h>
#include <tessera/data/token_windows.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "data/support.h"
#include "support/errors.h"

namespace tessera::data {
namespace {

using ::testing::AllOf;
using testing::counting_file;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::names_in;
using testing::read_bytes;
using testing::TempFolder;
using testing::write_bytes;
namespace fs = std::filesystem;

class TokenFileTest : public ::testing::Test {
 protected:
  /// The error of opening these bytes.
  std::string error_for(const std::string& bytes) {
    write_bytes(folder_ / "x.tokens", bytes);
    return error_of([&] { TokenFile(folder_ / "x.tokens"); });
  }

  std::string small_file() {
    counting_file(folder_ / "small", 3);
    return read_bytes(folder_ / "small");
  }

  const TempFolder folder_;
};

TEST_F(TokenFileTest, TokensComeBackAtBothWidths) {
  EXPECT_TRUE(rc::check([this] {
    const auto vocabulary = *rc::gen::elementOf(
        std::vector<int64_t>{1, 300, 65536, 65537, int64_t{1} << 31});
    const auto tokens = *rc::gen::container<std::vector<int64_t>>(
        rc::gen::inRange<int64_t>(0, vocabulary));
    const auto cut = *rc::gen::inRange<size_t>(0, tokens.size() + 1);
    const std::span all(tokens);
    TokenFileWriter writer(folder_ / "x.tokens", vocabulary);
    writer.append(all.first(cut));
    writer.append(all.subspan(cut));
    writer.close();
    const TokenFile file(folder_ / "x.tokens");
    RC_ASSERT(file.size() == std::ssize(tokens));
    RC_ASSERT(file.vocabulary() == vocabulary);
    RC_ASSERT(
        fs::file_size(folder_ / "x.tokens") ==
        24 + tokens.size() * (vocabulary <= 65536 ? 2 : 4));
    std::vector<int64_t> found(tokens.size() - cut);
    file.read(static_cast<int64_t>(cut), found);
    RC_ASSERT(std::equal(found.begin(), found.end(), all.subspan(cut).begin()));
  }));
}

/// docs/formats/token-file.md has this example.
TEST_F(TokenFileTest, WritesTheDocumentedBytes) {
  TokenFileWriter writer(folder_ / "x.tokens", 300);
  writer.append(std::vector<int32_t>{1, 2, 299});
  writer.close();
  EXPECT_EQ(
      read_bytes(folder_ / "x.tokens"),
      std::string("TESSTOK1") + std::string("\x02\0\0\0", 4) +
          std::string("\x2c\x01\0\0", 4) +
          std::string("\x03\0\0\0\0\0\0\0", 8) +
          std::string("\x01\0\x02\0\x2b\x01", 6));
}

TEST_F(TokenFileTest, LongReadsComeInPieces) {
  const TokenFile file = counting_file(folder_ / "x", 100000); // 4 bytes each
  std::vector<int64_t> found(90001);
  file.read(9999, found);
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i], static_cast<int64_t>(i) + 9999);
  }
  found.resize(2);
  EXPECT_THROW(file.read(99999, found), c10::IndexError);
  EXPECT_THROW(file.read(-1, found), c10::IndexError);
  EXPECT_THROW(file.read(INT64_MAX, found), c10::IndexError);
}

TEST_F(TokenFileTest, RejectsEveryTruncation) {
  const std::string bytes = small_file();
  for (size_t length = 0; length < bytes.size(); ++length) {
    SCOPED_TRACE(length);
    EXPECT_THAT(
        error_for(bytes.substr(0, length)),
        AllOf(
            HasSubstr("x.tokens"),
            HasSubstr(length < 24 ? "the header alone" : "promises 3 tokens")));
  }
  EXPECT_THAT(error_for(bytes + "x"), HasSubstr("has 7 bytes for them"));
  EXPECT_THAT(error_for(bytes + "xx"), HasSubstr("has 8 bytes for them"));
}

TEST_F(TokenFileTest, RejectsHeadersThatMakeNoSense) {
  const auto with = [this](size_t place, const std::string& what) {
    std::string bytes = small_file();
    bytes.replace(place, what.size(), what);
    return error_for(bytes);
  };
  EXPECT_THAT(with(0, "X"), HasSubstr("is not a token file"));
  EXPECT_THAT(with(7, "2"), HasSubstr("version '2'"));
  EXPECT_THAT(with(8, "\x03"), HasSubstr("tokens of 3 bytes"));
  EXPECT_THAT(with(12, std::string(4, '\0')), HasSubstr("a vocabulary of 0"));
  EXPECT_THAT(with(12, "\xff\xff\xff\xff"), HasSubstr("a vocabulary of 4294"));
  EXPECT_THAT(
      with(16, "\xff\xff\xff\xff\xff\xff\xff\xff"),
      HasSubstr("promises 18446744073709551615 tokens"));
}

TEST_F(TokenFileTest, SurvivesAFileThatIsCutWhileItIsOpen) {
  const TokenFile file = counting_file(folder_ / "x.tokens", 100000);
  fs::resize_file(folder_ / "x.tokens", 5000);
  std::vector<int64_t> found(10);
  file.read(0, found);
  EXPECT_THAT(
      error_of([&] { file.read(90000, found); }),
      AllOf(
          HasSubstr("x.tokens"),
          HasSubstr("ends before token 90009"),
          HasSubstr("cut after it was opened")));
}

TEST_F(TokenFileTest, RejectsTokensBeyondTheVocabulary) {
  std::string bytes = small_file(); // a vocabulary of 3
  bytes[26] = 7;
  write_bytes(folder_ / "x.tokens", bytes);
  const TokenFile file(folder_ / "x.tokens");
  std::vector<int64_t> found(3);
  EXPECT_THAT(
      error_of([&] { file.read(0, found); }),
      AllOf(HasSubstr("x.tokens"), HasSubstr("token 1 is 7")));
}

TEST_F(TokenFileTest, RejectsWhatIsNoFile) {
  EXPECT_THAT(
      error_of([&] { TokenFile(folder_ / "nowhere"); }),
      AllOf(HasSubstr("nowhere"), HasSubstr("No such file")));
  EXPECT_THAT(
      error_of([&] { TokenFile{folder_.path()}; }), HasSubstr("not a file"));
}

TEST_F(TokenFileTest, AFileAppearsCompleteOrNotAtAll) {
  {
    TokenFileWriter writer(folder_ / "x.tokens", 10);
    writer.append(std::vector<int32_t>{1, 2, 3});
    EXPECT_EQ(writer.size(), 3);
    EXPECT_THAT(names_in(folder_.path()), ElementsAre("x.tokens.partial"));
  }
  EXPECT_THAT(names_in(folder_.path()), ElementsAre());
  counting_file(folder_ / "x.tokens", 5);
  {
    TokenFileWriter writer(folder_ / "x.tokens", 10); // given up again
    writer.append(std::vector<int32_t>{1});
  }
  EXPECT_EQ(TokenFile(folder_ / "x.tokens").size(), 5);
}

TEST_F(TokenFileTest, AClosedFileTakesNoMoreTokens) {
  TokenFileWriter writer(folder_ / "x.tokens", 10);
  writer.append(std::vector<int32_t>{1, 2, 3});
  writer.close();
  EXPECT_THAT(
      error_of([&] { writer.append(std::vector<int32_t>{4}); }),
      HasSubstr("closed already"));
  EXPECT_EQ(writer.size(), 3);
}

TEST_F(TokenFileTest, AFileWhoseWriteFailedIsNeverCompleted) {
  fs::create_symlink("/dev/full", folder_ / "x.tokens.partial");
  TokenFileWriter writer(folder_ / "x.tokens", 10);
  writer.append(std::vector<int32_t>{1, 2, 3});
  EXPECT_THAT(
      error_of([&] { writer.close(); }), HasSubstr("No space left on device"));
  EXPECT_THAT(
      error_of([&] { writer.append(std::vector<int32_t>{4}); }),
      HasSubstr("Write it anew"));
  EXPECT_THAT(error_of([&] { writer.close(); }), HasSubstr("Write it anew"));
  EXPECT_FALSE(fs::exists(folder_ / "x.tokens"));
}

TEST_F(TokenFileTest, RejectsTokensThatDoNotFit) {
  TokenFileWriter writer(folder_ / "x.tokens", 10);
  EXPECT_THAT(
      error_of([&] {
        writer.append(std::vector<int32_t>{1, 10});
      }),
      AllOf(HasSubstr("a token 10"), HasSubstr("0 to 9")));
  EXPECT_THROW(writer.append(std::vector<int64_t>{-1}), c10::ValueError);
  EXPECT_EQ(writer.size(), 0);
  writer.close();
  EXPECT_EQ(TokenFile(folder_ / "x.tokens").size(), 0);
  EXPECT_THROW(TokenFileWriter(folder_ / "y", 0), c10::ValueError);
  EXPECT_THAT(
      error_of([&] { TokenFileWriter(folder_ / "no" / "y", 5); }),
      HasSubstr("cannot be made"));
}

// ---- Windows ----------------------------------------------------------------

TEST_F(TokenFileTest, TargetsAreTheTokensThatFollow) {
  Loader loader(
      TokenWindows(counting_file(folder_ / "x", 100), 10),
      LoaderOptions().batch_size(9).seed(3));
  EXPECT_EQ(loader.size(), 9); // the tenth has no last target
  const auto batch = loader.next();
  EXPECT_TRUE(torch::equal(batch->inputs + 1, batch->targets));
  const auto starts = std::get<0>(batch->inputs.select(1, 0).sort());
  EXPECT_TRUE(torch::equal(starts, torch::arange(0, 90, 10)));
  EXPECT_FALSE(torch::equal(starts, batch->inputs.select(1, 0)));
}

TEST_F(TokenFileTest, OneWindowIsARowOfMany) {
  const TokenWindows windows(counting_file(folder_ / "x", 50), 7);
  const std::vector<int64_t> wanted{3, 1};
  const TokenBatch rows = windows.read(wanted);
  EXPECT_TRUE(torch::equal(rows.inputs[0], windows.get(3).inputs));
  EXPECT_TRUE(torch::equal(rows.targets[1], windows.get(1).targets));
  EXPECT_THROW(windows.get(7), c10::IndexError);
}

TEST_F(TokenFileTest, SpreadReachesFromTheFirstToTheLast) {
  const TokenFile file = counting_file(folder_ / "x", 100);
  Loader loader(
      TokenWindows::spread(file, 10, 5),
      LoaderOptions().batch_size(5).shuffle(false));
  const auto batch = loader.next();
  EXPECT_EQ(batch->inputs[0][0].item<int64_t>(), 0);
  EXPECT_EQ(batch->targets[4][9].item<int64_t>(), 99);
  EXPECT_EQ(
      TokenWindows::spread(file, 10, 1).get(0).inputs[0].item<int64_t>(), 0);
}

TEST_F(TokenFileTest, RejectsATextThatIsTooShort) {
  const TokenFile file = counting_file(folder_ / "x", 10);
  EXPECT_THAT(
      error_of([&] { TokenWindows(file, 10); }),
      AllOf(HasSubstr("10 tokens"), HasSubstr("smaller length")));
  EXPECT_THAT(
      error_of([&] { TokenWindows(counting_file(folder_ / "y", 0), 1); }),
      HasSubstr("0 tokens"));
  EXPECT_THAT(
      error_of([&] { TokenWindows(file, 0); }), HasSubstr("windows of 0"));
}

} // namespace
} // namespace tessera::data
