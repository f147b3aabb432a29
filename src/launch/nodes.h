#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "launch/frontend.h"
#include "launch/node_channel.h"
#include "launch/rank_environment.h"
#include "launch/run_options.h"
#include "launch/verdict.h"

namespace tessera::launch {

/// This node's launcher among the launchers of all nodes.
///
/// [Note: node agreement]
/// All launchers run the same steps and tell each other through keys:
///
///   node/K             node K has come, with its options   (each node)
///   beat/K             a counter, every two seconds        (each but node 0)
///   A/start            where the ranks of attempt A meet   (node 0)
///   A/stop             somebody wants attempt A to stop    (any node)
///   A/report/K         how attempt A ended on K            (each node)
///   A/verdict          done, restart or fail               (node 0)
///   abort              the run ends now, and why           (any node)
///   left/K             K no longer needs the channel       (each but node 0)
///
/// A report is written after the node's ranks are gone, and the verdict after
/// all reports, so no rank of attempt A is left when attempt A + 1 begins. A
/// node that does not report in time, or whose counter stands still, is lost:
/// node 0 writes the report of that node, and there is no restart. Node 0 hosts
/// the channel; if node 0 dies, or does not answer for as long, the other nodes
/// end by themselves.
class Nodes {
 public:
  /// Borrows everything. The options have been validated.
  Nodes(
      const RunOptions& options,
      LauncherChannel* channel,
      Frontend* frontend);

  /// Waits for all nodes and compares their options. Throws NodesError on all
  /// nodes if they differ or if some are missing; throws Interrupted.
  void join();

  /// Node 0 begins an attempt; the other nodes wait for node 0.
  void publish_start(int attempt, const AttemptStart& start);
  AttemptStart await_start(int attempt);
  /// Lets time pass between two attempts. Throws NodesError if the run was
  /// aborted meanwhile, and Interrupted.
  void wait(std::chrono::milliseconds duration);

  /// Asks all nodes to stop their ranks. `ending` is why this node does.
  void request_stop(int attempt, Ending ending);
  /// Whether any node asked for the stop, or a node was lost. Quick; to be
  /// called several times a second while ranks are running.
  bool stop_requested(int attempt);
  /// Whether a user asked for the stop, so that ranks get the longer grace
  /// period.
  bool was_interrupted(int attempt);

  /// Gives this node's report and returns node 0's verdict; the same on all
  /// nodes. Waits as long as ranks of other nodes are running. Throws
  /// NodesError if the run was aborted, and Interrupted.
  Verdict agree(int attempt, const NodeReport& mine);

  /// Ends the run on all nodes. Never throws.
  void abort(const std::string& message, int exit_code) noexcept;
  /// The last call. Node 0 waits a little until the other nodes have read the
  /// outcome, since the channel ends with node 0. Never throws.
  void leave() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  /// Without a sign of life a node is lost after this time.
  static constexpr std::chrono::seconds kLostAfter{60};

  struct Peer {
    bool joined = false;
    std::string beat;
    Clock::time_point last_beat;
    bool lost = false;
  };

  bool is_node0() const {
    return options_.node_rank == 0;
  }
  void connect(Clock::time_point deadline);
  [[noreturn]] void abort_and_throw(const std::string& message);
  void throw_if_aborted();
  /// What this node tells the other nodes.
  std::string announcement() const;
  void check_peer(int node, const std::string& announced);
  std::string missing_nodes() const;
  void beat();
  bool any_lost() const;
  Verdict collect(int attempt, const NodeReport& mine);
  Verdict await_verdict(int attempt);
  Clock::duration answer_time() const;

  const RunOptions& options_;
  NodeChannel channel_;
  Frontend* frontend_;
  std::string identity_;
  std::vector<Peer> peers_;
  Clock::time_point next_beat_;
  int64_t num_beats_ = 0;
};

} // namespace tessera::launch
