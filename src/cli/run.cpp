#include <CLI/CLI.hpp>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <memory>
#include <optional>
#include <string>

#include "cli/commands.h"
#include "cli/hosted_run.h"
#include "launch/signals.h"
#include "launch/supervisor.h"

namespace tessera::cli {
namespace {

/// The longest timeout: more means for ever, and would overflow.
constexpr double kLongestSeconds = 365.0 * 24 * 3600;

struct RunSettings {
  launch::RunOptions options;
  std::string endpoint; // HOST:PORT, with several nodes
  std::optional<int> cpu_threads;
  double join_timeout_seconds = 600;
  double stop_timeout_seconds = 60;
};

std::chrono::milliseconds to_timeout(const char* flag, double seconds) {
  if (!(seconds >= 0 && seconds <= kLongestSeconds)) { // nan neither
    throw launch::InvalidRunOptions(fmt::format(
        "{} {} is not a valid timeout: give seconds, {:.0f} (a year) at most.",
        flag,
        seconds,
        kLongestSeconds));
  }
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

int run(RunSettings settings, std::vector<std::string> command) {
  if (command.empty()) {
    throw launch::InvalidRunOptions(
        "no program was given. Example: tessera run -n 4 ./train --lr 1e-3");
  }
  if (command.front().starts_with('-')) {
    throw launch::InvalidRunOptions(fmt::format(
        "there is no option {}. `tessera run --help` lists them; a program's own options follow its name.",
        command.front()));
  }
  launch::RunOptions& options = settings.options;
  options.program = command.front();
  options.args.assign(command.begin() + 1, command.end());
  options.cpu_threads = settings.cpu_threads;
  options.join_timeout =
      to_timeout("--join-timeout", settings.join_timeout_seconds);
  options.interrupt_grace =
      to_timeout("--stop-timeout", settings.stop_timeout_seconds);
  launch::validate(options);
  if (options.num_nodes > 1 && settings.endpoint.empty()) {
    throw launch::InvalidRunOptions(
        "--nnodes is above 1 but no --rdzv-endpoint HOST:PORT says where node 0 is.");
  }
  if (options.num_nodes == 1 && !settings.endpoint.empty()) {
    throw launch::InvalidRunOptions(
        "--rdzv-endpoint is for several nodes, and --nnodes is 1. Leave it out, or give --nnodes.");
  }
  if (options.tee && !options.log_dir) {
    throw launch::InvalidRunOptions(
        "--tee goes with --log-dir; without it everything is printed anyway.");
  }
  // Stores have threads; none of them may take the launcher's signals.
  launch::block_supervised_signals();
  return options.num_nodes == 1
      ? run_on_one_node(options)
      : run_on_several_nodes(options, settings.endpoint);
}

} // namespace

void drop_separator(std::vector<std::string>& words) {
  if (words.empty() || words.front() != "run") {
    return;
  }
  constexpr std::array kFlags{"--tee", "-h", "--help"};
  for (size_t i = 1; i < words.size() && words[i].starts_with('-'); ++i) {
    if (words[i] == "--") {
      words.erase(words.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
    const bool is_flag =
        std::find(kFlags.begin(), kFlags.end(), words[i]) != kFlags.end();
    // --name=value or -n4
    const bool holds_its_value = words[i].find('=') != std::string::npos ||
        (words[i].size() > 2 && words[i][1] != '-');
    i += is_flag || holds_its_value ? 0 : 1;
  }
}

Action add_run(CLI::App& app) {
  auto settings = std::make_shared<RunSettings>();
  launch::RunOptions& options = settings->options;
  auto* command = app.add_subcommand(
      "run", "Start the ranks of a program and supervise them");
  command->footer(
      "PROGRAM [ARGUMENTS]... follow the options: tessera run -n 4 ./train --lr 1e-3\n"
      "Sets torchrun's environment variables, prints each rank's lines with its\n"
      "number in front, and ends all ranks when one fails.");
  command->prefix_command();
  command->add_option(
      "-n,--nproc-per-node", options.ranks_per_node, "Ranks on this node");
  command->add_option("--nnodes", options.num_nodes, "Nodes in all");
  command->add_option(
      "--node-rank", options.node_rank, "This node's number, from 0");
  command->add_option(
      "--rdzv-endpoint",
      settings->endpoint,
      "HOST:PORT of node 0 (with --nnodes above 1)");
  command->add_option(
      "--max-restarts",
      options.max_restarts,
      "How often to restart all ranks when one fails");
  command->add_option(
      "--log-dir",
      options.log_dir,
      "Write each rank's output to files below this folder");
  command->add_flag(
      "--tee", options.tee, "With --log-dir, print the output as well");
  command->add_option(
      "--cpu-threads",
      settings->cpu_threads,
      "Threads for each rank (default: cores / ranks on this node)");
  command->add_option(
      "--run-id", options.run_id, "Name of the run, the same on all nodes");
  command->add_option(
      "--join-timeout",
      settings->join_timeout_seconds,
      "Seconds to wait for the other nodes");
  command->add_option(
      "--stop-timeout",
      settings->stop_timeout_seconds,
      "Seconds that ranks have to end after Ctrl-C or SIGTERM");
  return [settings, command] {
    try {
      return run(*settings, command->remaining());
    } catch (const launch::InvalidRunOptions& error) {
      std::cerr << "tessera run: " << error.what() << "\n";
      return 2;
    }
  };
}

} // namespace tessera::cli
