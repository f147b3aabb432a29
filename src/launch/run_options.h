#pragma once

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace tessera::launch {

/// Options that cannot be run as given. Thrown before anything is started.
class InvalidRunOptions : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// What `tessera run` starts, and how it supervises the ranks.
struct RunOptions {
  /// Path of the program, or a name that is looked up in PATH.
  std::string program;
  /// Arguments after the program's name.
  std::vector<std::string> args;

  /// Processes on each node; the same on all nodes.
  int ranks_per_node = 1;
  int num_nodes = 1;
  /// This launcher's node, 0 to num_nodes - 1. Node 0 decides for all.
  int node_rank = 0;

  /// How often all ranks may be started again after one of them failed.
  int max_restarts = 0;
  /// Each rank's output goes to
  /// launch_TIME/attempt_A/rank_R/{stdout,stderr}.log below this folder, where
  /// `latest` is a link to the newest launch_TIME.
  std::optional<std::filesystem::path> log_dir;
  /// With log_dir, print the output as well. Without log_dir it is always
  /// printed.
  bool tee = false;

  /// OMP_NUM_THREADS and MKL_NUM_THREADS of each rank. If not given: the
  /// variables of the launcher's environment where OMP_NUM_THREADS is set
  /// there, else default_cpu_threads().
  std::optional<int> cpu_threads;
  /// The time from the beginning of a stop until no rank is left. Ranks that
  /// are still running after nine tenths of it get SIGKILL.
  std::chrono::milliseconds stop_grace{5000};
  /// The same if the user asked to stop: ranks may want to save first. A second
  /// SIGINT does not wait.
  std::chrono::milliseconds interrupt_grace{60000};
  /// How long the nodes wait for one another at the start.
  std::chrono::milliseconds join_timeout{600000};

  /// TORCHELASTIC_RUN_ID; the same on all nodes.
  std::string run_id = "none";
  /// Variables added to each rank's environment. They win over those of the
  /// launcher's environment; those that the launcher computes are refused.
  std::map<std::string, std::string> extra_env;

  int world_size() const {
    return num_nodes * ranks_per_node;
  }
  int global_rank(int local_rank) const {
    return node_rank * ranks_per_node + local_rank;
  }
};

/// Throws InvalidRunOptions, naming the option, what it is and what it may be.
void validate(const RunOptions& options);

/// The cores this process may use divided by the ranks that share them, at
/// least 1.
int default_cpu_threads(int ranks_per_node);

} // namespace tessera::launch
