// Processes beside the test, also of another user.
#pragma once

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <utility>

namespace tessera::comm {

/// A user that nobody is.
inline constexpr uid_t kNeighbour = 65533;

#define SKIP_UNLESS_ROOT()                                             \
  if (geteuid() != 0) {                                                \
    GTEST_SKIP() << "another user cannot be played here (needs root)"; \
  }

/// A process with a task; its result is what `task` returns, 0 to 255.
class Process {
 public:
  explicit Process(const std::function<int()>& task) : pid_(fork()) {
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(task());
    }
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  int wait() {
    int status = 0;
    waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

/// Tells another process that something has happened.
class Signpost {
 public:
  Signpost() {
    EXPECT_EQ(pipe(ends_), 0);
  }
  ~Signpost() {
    close(ends_[0]);
    close(ends_[1]);
  }
  void pass(int number = 0) {
    EXPECT_EQ(write(ends_[1], &number, sizeof number), sizeof number);
  }
  /// The number that was passed on.
  int await() {
    int number = -1;
    EXPECT_EQ(read(ends_[0], &number, sizeof number), sizeof number);
    return number;
  }

 private:
  int ends_[2];
};

} // namespace tessera::comm
