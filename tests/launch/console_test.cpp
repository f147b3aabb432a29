#include "launch/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/unique_fd.h"

namespace tessera::launch {
namespace {

/// A terminal of 20 columns, and what is written to it.
class Terminal {
 public:
  Terminal() {
    int ours = -1;
    int theirs = -1;
    winsize size{.ws_row = 5, .ws_col = 20, .ws_xpixel = 0, .ws_ypixel = 0};
    termios raw{};
    ::cfmakeraw(&raw);
    EXPECT_EQ(::openpty(&ours, &theirs, nullptr, &raw, &size), 0);
    ours_ = UniqueFd(ours);
    theirs_ = UniqueFd(theirs);
    ::fcntl(ours, F_SETFL, O_NONBLOCK);
  }

  int fd() const {
    return theirs_.get();
  }
  std::string text() {
    char buffer[4096];
    const auto count = ::read(ours_.get(), buffer, sizeof(buffer));
    return count > 0 ? std::string(buffer, static_cast<size_t>(count)) : "";
  }

 private:
  UniqueFd ours_;
  UniqueFd theirs_;
};

class ConsoleTest : public testing::Test {
 protected:
  ConsoleTest() {
    ::setenv("TERM", "xterm", 1);
  }

  Terminal terminal_;
};

TEST_F(ConsoleTest, LinesGoAboveTheLiveLine) {
  Console console(terminal_.fd(), terminal_.fd());
  EXPECT_EQ(console.live_columns(), 20);
  console.set_live("10 %");
  console.write(Stream::Stdout, "hello\n");
  console.write(Stream::Stderr, "oh\n");
  console.set_live("20 %");
  console.set_live("");
  console.write_some();
  EXPECT_EQ(
      terminal_.text(),
      "\r\x1b[K10 %"
      "\r\x1b[Khello\n10 %"
      "\r\x1b[Koh\n10 %"
      "\r\x1b[K20 %"
      "\r\x1b[K");
}

TEST_F(ConsoleTest, ALiveLineIsCutToTheTerminal) {
  Console console(terminal_.fd(), terminal_.fd());
  console.set_live(std::string(50, 'x'));
  console.write_some();
  EXPECT_EQ(terminal_.text(), "\r\x1b[K" + std::string(19, 'x'));
}

TEST_F(ConsoleTest, NothingIsLiveWhereItCannotBe) {
  int fds[2];
  ASSERT_EQ(::pipe(fds), 0);
  const UniqueFd reader(fds[0]);
  const UniqueFd writer(fds[1]);
  Console piped(writer.get(), writer.get());
  EXPECT_EQ(piped.live_columns(), 0);
  piped.set_live("10 %");
  EXPECT_FALSE(piped.pending());

  ::setenv("TERM", "dumb", 1);
  EXPECT_EQ(Console(terminal_.fd(), terminal_.fd()).live_columns(), 0);
}

} // namespace
} // namespace tessera::launch
