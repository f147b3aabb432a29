// Runs another program in a test, bounded in time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/process_tree.h"

namespace tessera::testing {

struct CommandResult {
  /// Exit code, or 128 plus the signal that ended it.
  int exit_code = -1;
  bool timed_out = false;
  std::string output; // stdout and stderr as they came
  double seconds = 0;
};

struct CommandOptions {
  /// Added to this process's environment; variables without a value are removed
  /// from it.
  std::map<std::string, std::optional<std::string>> environment = {};
  std::chrono::seconds timeout{60};
};

/// A program that was started. It runs in a process group of its own; the
/// program and all its descendants are killed when the object is destroyed.
class Command {
 public:
  explicit Command(
      const std::vector<std::string>& words,
      const CommandOptions& options = {});
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  pid_t pid() const {
    return pid_;
  }
  /// Collects the output until the program ends or its time is up, when it is
  /// killed.
  CommandResult wait();
  /// Reads until the output contains `text`; false if the output ends before,
  /// or the time is up.
  bool wait_for_output(const std::string& text);
  /// The output so far.
  const std::string& output() const {
    return collected_;
  }

 private:
  bool read_some();
  /// Returns the program's status.
  int kill_tree();

  launch::ProcessTree tree_;
  pid_t pid_ = -1;
  int output_ = -1;
  std::string collected_;
  std::chrono::steady_clock::time_point started_;
  std::chrono::steady_clock::time_point deadline_;
};

CommandResult run_command(
    const std::vector<std::string>& words,
    const CommandOptions& options = {});

/// How often `what` occurs in `text`, such as a program's output.
int num_times(const std::string& text, const std::string& what);

/// The first words of a command that starts one rank on node `node` of two.
std::vector<std::string> run_on_node_of_two(
    int node,
    const std::string& endpoint);

/// Folder of the built programs.
std::string bin_dir();
/// `tessera`, `bin_dir()/tessera`.
std::string tessera_program();
/// Environment that removes what a launcher may have set for this process.
std::map<std::string, std::optional<std::string>> without_launcher();

} // namespace tessera::testing
