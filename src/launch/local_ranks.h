// The processes of an attempt's ranks on this node.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/failure_report.h"
#include "launch/frontend.h"
#include "launch/process.h"
#include "launch/process_tree.h"
#include "launch/rank_environment.h"
#include "launch/rank_output.h"
#include "launch/run_options.h"

namespace tessera::launch {

/// A process that is stuck in the kernel cannot be killed; after this long it
/// is left behind and named.
inline constexpr std::chrono::milliseconds kUnkillableAfter{10000};

/// What one attempt is made of.
struct AttemptPlan {
  int attempt = 0;
  Endpoint endpoint;
  /// Folder for the logs of this launch; nothing without one.
  std::optional<std::filesystem::path> log_dir;
  /// The launcher's environment, which ranks inherit.
  std::vector<std::string> base_environment;
};

struct LocalRank {
  using Clock = std::chrono::steady_clock;

  Process process;
  RankOutput* output;
  Clock::time_point started;
  Clock::time_point ended;
  std::optional<RankEnd> end;
};

/// Ranks by their local number. Those that have ended stay zombies until
/// reap(): see [Note: stopping].
class LocalRanks {
 public:
  /// Borrows both.
  LocalRanks(const RunOptions& options, const ProcessTree& tree)
      : options_(options), tree_(tree) {}
  /// Kills what has not been reaped.
  ~LocalRanks();
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  /// Throws OutputError or SpawnError; ranks started before that stay.
  void start(const AttemptPlan& plan, Frontend* frontend);

  size_t size() const {
    return ranks_.size();
  }
  LocalRank& operator[](size_t local_rank) {
    return ranks_[local_rank];
  }
  auto begin() {
    return ranks_.begin();
  }
  auto end() {
    return ranks_.end();
  }

  /// Adds the ends of ranks that run, and returns these ranks.
  std::vector<size_t> add_to_poll(std::vector<pollfd>* fds) const;

  /// To the process groups of all ranks.
  void signal(int signal) const;
  /// To descendants that are in none of these groups.
  void signal_strays(int signal) const;
  std::vector<ProcessInfo> live_descendants() const;
  std::set<pid_t> pids() const;
  size_t num_running() const;
  void reap();

  /// Every rank must have ended or been given up.
  FailureReport failure_report(size_t failed, int attempt) const;

 private:
  const RunOptions& options_;
  const ProcessTree& tree_;
  std::vector<std::unique_ptr<RankOutput>> outputs_;
  std::vector<LocalRank> ranks_;
};

} // namespace tessera::launch
