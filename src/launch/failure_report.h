#pragma once

#include <sys/types.h>

#include <span>
#include <string>
#include <vector>

#include "launch/process.h"
#include "launch/run_options.h"

namespace tessera::launch {

/// How one rank ended, seen from the launcher.
struct RankEnd {
  enum class Kind {
    Finished, ///< Exited 0 while the run was going on.
    Failed, ///< Failed while the run was going on.
    Stopped, ///< Ended after the launcher had begun to stop the ranks.
    Unkillable, ///< Still there after SIGKILL.
  };

  int rank = 0;
  Kind kind = Kind::Finished;
  ExitStatus status;
  /// kStopped: seconds from the beginning of the stop to the end.
  double stop_seconds = 0;
};

/// What is known about the rank that failed first, and about the others.
struct FailureReport {
  RankEnd first;
  pid_t pid = 0;
  /// From the start of the rank to its end.
  double seconds = 0;
  int attempt = 0;
  /// The rank that printed last_lines: the one that failed first, or another if
  /// that rank printed nothing.
  int speaker = 0;
  std::vector<std::string> last_lines;
  /// The log that holds them; empty without a log folder.
  std::string log_path;
  /// All other ranks of the node.
  std::vector<RankEnd> others;
};

/// Several lines for a human, without "tessera run: " in front and without a
/// newline at the end.
std::string failure_text(
    const RunOptions& options,
    const FailureReport& report);

/// "0 (SIGTERM), 3 (SIGKILL after 4.5 s)"; only those that were stopped.
std::string stopped_text(std::span<const RankEnd> ends);

/// What to say when a signal of the user ended an attempt; `stopped` comes from
/// stopped_text().
std::string interrupted_text(
    const RunOptions& options,
    int signal,
    const std::string& stopped);

/// "killed by SIGSEGV (segmentation fault)" or "exit code 3".
std::string status_text(const ExitStatus& status);

/// The command line, quoted where a shell would need it.
std::string command_text(const RunOptions& options);

} // namespace tessera::launch
