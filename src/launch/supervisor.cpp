#include "launch/supervisor.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "launch/attempt.h"
#include "launch/frontend.h"
#include "launch/nodes.h"
#include "launch/process_tree.h"
#include "launch/signals.h"
#include "launch/summary.h"
#include "launch/verdict.h"

namespace tessera::launch {
namespace {

constexpr int kExitLauncherError = 1;

/// The attempts of one run, until a verdict ends it.
class Supervisor {
 public:
  Supervisor(
      const RunOptions& options,
      const EndpointProvider& endpoint_provider,
      Channel* channel,
      RunStreams streams)
      : options_(options),
        endpoint_provider_(endpoint_provider),
        frontend_(streams.out_fd, streams.err_fd),
        environment_(current_environment()) {
    if (options.num_nodes > 1) {
      nodes_ = std::make_unique<Nodes>(options, channel, &frontend_);
    }
  }

  int run() {
    int exit_code = run_attempts();
    if (nodes_ != nullptr) {
      nodes_->leave();
    }
    const int signal = frontend_.flush();
    if (exit_code == 0 && signal != 0) {
      exit_code = 128 + signal;
    }
    if (exit_code == 0 && !frontend_.console.error().empty()) {
      frontend_.say(frontend_.console.error());
      frontend_.flush();
      exit_code = kExitLauncherError;
    }
    return exit_code;
  }

 private:
  int run_attempts() {
    try {
      if (nodes_ != nullptr) {
        nodes_->join();
      }
      for (int attempt = 0;; ++attempt) {
        const Verdict verdict = run_attempt(attempt);
        if (verdict.action != Action::kRestart) {
          return verdict.exit_code;
        }
        frontend_.say(
            "restarting (" + std::to_string(attempt + 1) + " of " +
            std::to_string(options_.max_restarts) + ")");
      }
    } catch (const Interrupted& interrupt) {
      const std::string message = "interrupted by " +
          signal_name(interrupt.signal) +
          (nodes_ != nullptr ? " on node " + std::to_string(options_.node_rank)
                             : "") +
          ".";
      return end_everywhere(message, 128 + interrupt.signal);
    } catch (const NodesError& error) {
      frontend_.say(error.what());
      return error.exit_code();
    } catch (const std::exception& error) {
      return end_everywhere(error.what(), kExitLauncherError);
    }
  }

  Verdict run_attempt(int attempt) {
    AttemptPlan plan{
        .attempt = attempt,
        .endpoint = find_endpoint(attempt),
        .base_environment = environment_};
    const AttemptResult result =
        Attempt(options_, std::move(plan), tree_, &frontend_, nodes_.get())
            .run();
    const Verdict verdict = agree(attempt, result);
    if (verdict.action != Action::kDone) {
      std::string text = verdict.text;
      const std::string stopped = stopped_text(result.ends);
      if (verdict.node_rank != options_.node_rank && !stopped.empty()) {
        text += "\n  the ranks of node " + std::to_string(options_.node_rank) +
            " were stopped: " + stopped + ".";
      }
      frontend_.say(text);
    }
    return verdict;
  }

  Verdict agree(int attempt, const AttemptResult& result) {
    if (nodes_ == nullptr) {
      return decide({&result.report, 1}, attempt, options_.max_restarts);
    }
    try {
      return nodes_->agree(attempt, result.report);
    } catch (const ChannelLost&) {
      // What happened here is still worth saying, and comes first.
      if (result.report.text.empty()) {
        throw;
      }
      return Verdict{
          .action = Action::kFail,
          .exit_code = std::max(1, result.report.exit_code),
          .node_rank = options_.node_rank,
          .text = result.report.text};
    }
  }

  Endpoint find_endpoint(int attempt) {
    if (options_.node_rank != 0) {
      return nodes_->await_endpoint(attempt);
    }
    Endpoint endpoint;
    try {
      endpoint = endpoint_provider_(attempt);
    } catch (const std::exception& error) {
      throw std::runtime_error(
          "cannot open a meeting point for the ranks of attempt " +
          std::to_string(attempt) + ": " + error.what());
    }
    if (nodes_ != nullptr) {
      nodes_->publish_endpoint(attempt, endpoint);
    }
    return endpoint;
  }

  int end_everywhere(const std::string& message, int exit_code) {
    if (nodes_ != nullptr) {
      nodes_->abort(message, exit_code);
    }
    frontend_.say(message);
    return exit_code;
  }

  const RunOptions& options_;
  const EndpointProvider& endpoint_provider_;
  Frontend frontend_;
  SubreaperScope subreaper_;
  ProcessTree tree_;
  std::vector<std::string> environment_;
  std::unique_ptr<Nodes> nodes_;
};

} // namespace

int run(
    const RunOptions& options,
    const EndpointProvider& endpoint_provider,
    Channel* channel,
    RunStreams streams) {
  validate(options);
  if (!endpoint_provider && options.node_rank == 0) {
    throw InvalidRunOptions("node 0 needs an endpoint provider.");
  }
  if (options.num_nodes > 1 && channel == nullptr) {
    throw InvalidRunOptions(
        std::to_string(options.num_nodes) +
        " nodes need a channel between their launchers. Give the address of "
        "node 0.");
  }
  return Supervisor(options, endpoint_provider, channel, streams).run();
}

} // namespace tessera::launch
