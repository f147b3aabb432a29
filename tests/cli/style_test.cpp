// Colours on a terminal, and nowhere else.
#include "support/command.h"

namespace tessera {
namespace {

using namespace tessera::testing; // NOLINT: the fixture of these tests
using ::testing::HasSubstr;
using ::testing::Not;

using Environment = std::map<std::string, std::optional<std::string>>;

/// A plan that does not fit, printed to a terminal of its own.
std::string plan_on_a_terminal(const Environment& environment) {
  const auto result = run_command(
      {"script",
       "-qec",
       tessera_program() +
           " plan --layers 2 --width 64 --vocabulary 256 --memory 1kB",
       "/dev/null"},
      {.environment = environment});
  EXPECT_EQ(result.exit_code, 1) << result.output;
  return result.output;
}

TEST(StyleTest, ATerminalGetsColours) {
  EXPECT_THAT(
      plan_on_a_terminal({{"TERM", "xterm"}, {"NO_COLOR", std::nullopt}}),
      HasSubstr("\x1b[1;31mDOES NOT FIT\x1b[0m"));
}

TEST(StyleTest, NoColorAndADumbTerminalGetNone) {
  EXPECT_THAT(
      plan_on_a_terminal({{"TERM", "xterm"}, {"NO_COLOR", "1"}}),
      Not(HasSubstr("\x1b[")));
  EXPECT_THAT(
      plan_on_a_terminal({{"TERM", "dumb"}, {"NO_COLOR", std::nullopt}}),
      Not(HasSubstr("\x1b[")));
}

TEST(StyleTest, APipeGetsNone) {
  const auto result = run_command(
      {tessera_program(),
       "plan",
       "--layers",
       "2",
       "--width",
       "64",
       "--memory",
       "1kB"},
      {.environment = {{"TERM", "xterm"}, {"NO_COLOR", std::nullopt}}});
  EXPECT_THAT(result.output, HasSubstr("DOES NOT FIT"));
  EXPECT_THAT(result.output, Not(HasSubstr("\x1b[")));
}

} // namespace
} // namespace tessera
