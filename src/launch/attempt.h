#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launch/failure_report.h"
#include "launch/frontend.h"
#include "launch/local_ranks.h"
#include "launch/nodes.h"
#include "launch/process_tree.h"
#include "launch/run_options.h"
#include "launch/verdict.h"

namespace tessera::launch {

/// Exit code where the launcher itself failed, not a rank.
inline constexpr int kExitLauncherError = 1;

/// How an attempt ended on this node.
struct AttemptResult {
  NodeReport report;
  std::vector<RankEnd> ends;
};

/// One start of all ranks of this node, watched until none is left.
///
/// [Note: stopping]
/// The first thing that ends the attempt is its cause: a rank that fails, the
/// user, another node, or the console. From then on every rank's process group
/// has been sent SIGTERM (or the user's signal), and what is left after nine
/// tenths of the grace period gets SIGKILL. Ranks that have ended stay zombies
/// until the end, so that their process groups can be signalled without
/// hitting a stranger that got the same number. Processes that ranks leave
/// behind, in whatever group, are stopped the same way, also after a success.
class Attempt {
 public:
  /// Borrows everything; `nodes` is null for a single node.
  Attempt(
      const RunOptions& options,
      AttemptPlan plan,
      const ProcessTree& tree,
      Frontend* frontend,
      Nodes* nodes);
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  /// Starts the ranks and returns when they and all their descendants are
  /// gone. To be called once.
  AttemptResult run();

 private:
  using Clock = std::chrono::steady_clock;

  enum class Phase {
    Running, ///< No reason to stop has been seen.
    Stopping, ///< Asked to end; SIGKILL follows at deadline_.
    Killing, ///< SIGKILL was sent; given up at deadline_.
    Abandoned, ///< Something does not die; it is left behind.
  };

  void step();
  int poll_timeout_ms() const;
  void take_signals();
  void take_signal(int signal);
  void take_output(size_t local_rank, Stream stream);
  void take_exits(const std::vector<size_t>& ready);
  void check_console();
  void check_nodes();
  void check_deadline();
  bool is_over();
  /// Ranks that are still there after nine tenths of `grace` are killed.
  void begin_stop(int signal, std::chrono::milliseconds grace);
  void kill_all();
  void fail_with(const std::string& message, int exit_code);
  void set_cause(Ending ending, int exit_code);
  void tell_nodes();
  void collect_output();
  AttemptResult make_result();

  const RunOptions& options_;
  const AttemptPlan plan_;
  const ProcessTree& tree_;
  Frontend* frontend_;
  Nodes* nodes_;

  LocalRanks ranks_;
  Phase phase_ = Phase::Running;
  Clock::time_point stop_began_;
  Clock::time_point deadline_;
  Clock::time_point next_node_check_;
  bool channel_lost_ = false;
  bool strays_signalled_ = false;
  // The first child that ended since the last look, where the kernel said so.
  pid_t first_to_end_ = 0;
  int num_interrupts_ = 0;
  bool has_hung_up_ = false;
  std::optional<size_t> failed_first_;
  // What becomes the node's report.
  NodeReport cause_;
};

} // namespace tessera::launch
