#include "launch/supervisor.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "launch/attempt.h"
#include "launch/backoff.h"
#include "launch/failure_report.h"
#include "launch/frontend.h"
#include "launch/launch_folder.h"
#include "launch/nodes.h"
#include "launch/process_tree.h"
#include "launch/signals.h"
#include "launch/verdict.h"

namespace tessera::launch {
namespace {

/// "0.5 s", "16 s".
std::string seconds_text(std::chrono::milliseconds duration) {
  const auto tenths = duration.count() / 100;
  return std::to_string(tenths / 10) +
      (tenths % 10 == 0 ? "" : "." + std::to_string(tenths % 10)) + " s";
}

/// The attempts of one run, until a verdict ends it.
class Supervisor {
 public:
  Supervisor(
      const RunOptions& options,
      const EndpointProvider& endpoint_provider,
      LauncherChannel* channel,
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
        const auto began = std::chrono::steady_clock::now();
        const Verdict verdict = run_attempt(attempt);
        if (verdict.action != Action::Restart) {
          return verdict.exit_code;
        }
        const bool failed_early =
            std::chrono::steady_clock::now() - began < kSteadyAfter;
        early_failures_ = failed_early ? early_failures_ + 1 : 0;
        wait_before_restart(attempt + 1);
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

  /// Node 0 waits for all: the others begin when it does.
  void wait_before_restart(int number) {
    const auto delay = options_.node_rank == 0 ? restart_delay(early_failures_)
                                               : std::chrono::milliseconds(0);
    std::string text = "restarting (" + std::to_string(number) + " of " +
        std::to_string(options_.max_restarts) + ")";
    if (delay.count() > 0) {
      text += " in " + seconds_text(delay) + ", since " +
          std::to_string(early_failures_) +
          " attempts in a row failed within a minute";
    }
    frontend_.say(text);
    if (nodes_ != nullptr) {
      nodes_->wait(delay);
    } else {
      frontend_.pause(delay);
    }
  }

  Verdict run_attempt(int attempt) {
    const AttemptStart start = find_start(attempt);
    AttemptPlan plan{
        .attempt = attempt,
        .endpoint = start.endpoint,
        .log_dir = std::nullopt,
        .base_environment = environment_};
    if (options_.log_dir) {
      plan.log_dir = *options_.log_dir / start.launch;
    }
    const AttemptResult result =
        Attempt(options_, std::move(plan), tree_, &frontend_, nodes_.get())
            .run();
    const Verdict verdict = agree(attempt, result);
    if (verdict.action != Action::Done) {
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
          .action = Action::Fail,
          .exit_code = std::max(1, result.report.exit_code),
          .node_rank = options_.node_rank,
          .text = result.report.text};
    }
  }

  AttemptStart find_start(int attempt) {
    if (attempt == 0 && options_.node_rank == 0) {
      launch_ = new_launch_name(options_.log_dir);
    }
    const AttemptStart start =
        options_.node_rank == 0 ? begin(attempt) : nodes_->await_start(attempt);
    if (attempt == 0 && options_.log_dir) {
      link_to(start.launch);
    }
    return start;
  }

  AttemptStart begin(int attempt) {
    AttemptStart start{.endpoint = {}, .launch = launch_};
    try {
      start.endpoint = endpoint_provider_(attempt);
    } catch (const std::exception& error) {
      throw std::runtime_error(
          "cannot open a meeting point for the ranks of attempt " +
          std::to_string(attempt) + ": " + error.what());
    }
    if (nodes_ != nullptr) {
      nodes_->publish_start(attempt, start);
    }
    return start;
  }

  /// Where no log can be written, that is the error to report.
  void link_to(const std::string& launch) {
    std::error_code error;
    std::filesystem::create_directories(*options_.log_dir / launch, error);
    const std::string problem =
        error ? "" : point_latest_at(*options_.log_dir, launch);
    if (!problem.empty()) {
      frontend_.say(problem);
    }
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
  std::string launch_; // on node 0
  int early_failures_ = 0; // in a row
};

} // namespace

int run(
    const RunOptions& options,
    const EndpointProvider& endpoint_provider,
    LauncherChannel* channel,
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
