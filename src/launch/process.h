#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace tessera::launch {

/// How a process ended.
struct ExitStatus {
  int code = 0;
  /// The signal that killed it; 0 if it exited by itself.
  int signal = 0;

  bool ok() const {
    return code == 0 && signal == 0;
  }
  /// As a shell reports it: the code, or 128 plus the signal.
  int exit_code() const {
    return signal != 0 ? 128 + signal : code;
  }
};

/// A program that could not be started; the text names it and says why.
class SpawnError : public std::runtime_error {
 public:
  SpawnError(const std::string& message, int exit_code)
      : std::runtime_error(message), exit_code_(exit_code) {}

  /// As a shell's: 127 if the program was not found, else 126.
  int exit_code() const {
    return exit_code_;
  }

 private:
  int exit_code_;
};

/// What a child process is given. Descriptors stay the caller's.
struct SpawnRequest {
  /// argv[0] is the program: a path, or a name to look up in the PATH of
  /// `environment`.
  std::vector<std::string> argv;
  /// "NAME=value" each; the whole environment of the child.
  std::vector<std::string> environment;
  int stdout_fd = -1;
  int stderr_fd = -1;
  sigset_t signal_mask = {};
};

/// One running child, leader of a process group of its own.
///
/// A child that has ended stays a zombie until reap(), so its pid cannot be
/// given to another process while its group may still have to be signalled.
class Process {
 public:
  /// Starts the program and returns once it has been executed: stdin is
  /// /dev/null, no other descriptor is inherited, and the child is killed if
  /// the calling thread ends. Safe in a process with threads. Throws
  /// SpawnError; no child is left then.
  static Process spawn(const SpawnRequest& request);

  Process(Process&&) = default;
  Process& operator=(Process&&) = default;

  pid_t pid() const {
    return pid_;
  }
  /// Readable once the process has ended.
  int pidfd() const {
    return pidfd_.get();
  }
  /// The status once the process has ended, without reaping it.
  std::optional<ExitStatus> poll_exit() const;
  /// Signals the process and every process still in its group.
  void signal_group(int signal) const;
  /// Frees the pid of a process that has ended. Does not block; afterwards
  /// only pid() may be called.
  void reap();

 private:
  Process(pid_t pid, UniqueFd pidfd) : pid_(pid), pidfd_(std::move(pidfd)) {}

  pid_t pid_;
  UniqueFd pidfd_;
};

} // namespace tessera::launch
