#include "report/line_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "report/report_error.h"
#include "report/support.h"

namespace tessera::report {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Each as "number:text", with "!" for a line that is too long and "~" for one
/// without an end.
std::vector<std::string> lines_of(const std::string& text, size_t max) {
  const ScratchFolder folder;
  write_file(folder / "log", text);
  LineReader reader(folder / "log", max);
  LineReader::Line line;
  std::vector<std::string> found;
  while (reader.next(&line)) {
    found.push_back(
        std::to_string(line.number) + ":" +
        (line.is_too_long ? "!" : std::string(line.text)) +
        (line.has_end ? "" : "~"));
  }
  return found;
}

TEST(LineReaderTest, GivesLinesAndSaysWhetherTheLastOneEnds) {
  EXPECT_THAT(lines_of("", 9), IsEmpty());
  EXPECT_THAT(lines_of("a\n\nb\n", 9), ElementsAre("1:a", "2:", "3:b"));
  EXPECT_THAT(lines_of("a\nb", 9), ElementsAre("1:a", "2:b~"));
}

TEST(LineReaderTest, SkipsLinesThatAreTooLong) {
  EXPECT_THAT(
      lines_of("12345\n123456\n1\n", 5), ElementsAre("1:12345", "2:!", "3:1"));
  EXPECT_THAT(lines_of("123456", 5), ElementsAre("1:!~"));
}

TEST(LineReaderTest, LinesMayBeLongerThanWhatIsReadAtOnce) {
  const std::string line(3 << 20, 'x');
  EXPECT_THAT(
      lines_of("a\n" + line + "\nb\n", 4 << 20),
      ElementsAre("1:a", "2:" + line, "3:b"));
  EXPECT_THAT(
      lines_of("a\n" + line + "\nb\n", 100), ElementsAre("1:a", "2:!", "3:b"));
}

TEST(LineReaderTest, RejectsAFolder) {
  const ScratchFolder folder;
  EXPECT_THROW(
      {
        LineReader reader(folder.path(), 10);
        LineReader::Line line;
        reader.next(&line);
      },
      ReportError);
}

} // namespace
} // namespace tessera::report
