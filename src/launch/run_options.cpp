#include "launch/run_options.h"

#include <algorithm>
#include <climits>

#include "base/cores.h"
#include "launch/rank_environment.h"

namespace tessera::launch {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw InvalidRunOptions(message);
}

bool has_nul(const std::string& text) {
  return text.find('\0') != std::string::npos;
}

void validate_extra_env(const RunOptions& options) {
  for (const auto& [name, value] : options.extra_env) {
    if (name.empty() || name.find('=') != std::string::npos || has_nul(name) ||
        has_nul(value)) {
      refuse(
          "\"" + name + "\" is not a variable name. Give NAME=VALUE with a " +
          "non-empty NAME.");
    }
    if (is_computed_variable(name)) {
      refuse(
          "the variable " + name +
          " is computed for each rank and cannot be given. Remove it from the "
          "extra environment.");
    }
  }
}

} // namespace

void validate(const RunOptions& options) {
  if (options.program.empty()) {
    refuse("no program was given. Name the program to start.");
  }
  if (has_nul(options.program) ||
      std::any_of(options.args.begin(), options.args.end(), has_nul)) {
    refuse("the program or an argument contains a zero byte.");
  }
  if (options.ranks_per_node < 1) {
    refuse(
        "ranks per node is " + std::to_string(options.ranks_per_node) +
        ", must be at least 1.");
  }
  if (options.num_nodes < 1) {
    refuse(
        "number of nodes is " + std::to_string(options.num_nodes) +
        ", must be at least 1.");
  }
  if (options.ranks_per_node > INT_MAX / options.num_nodes) {
    refuse(
        std::to_string(options.num_nodes) + " nodes with " +
        std::to_string(options.ranks_per_node) +
        " ranks each are more ranks than an int can count.");
  }
  if (options.node_rank < 0 || options.node_rank >= options.num_nodes) {
    refuse(
        "node rank is " + std::to_string(options.node_rank) + " with " +
        std::to_string(options.num_nodes) + " node(s), must be 0 to " +
        std::to_string(options.num_nodes - 1) + ".");
  }
  if (options.max_restarts < 0) {
    refuse(
        "max restarts is " + std::to_string(options.max_restarts) +
        ", must be at least 0.");
  }
  if (options.cpu_threads && *options.cpu_threads < 1) {
    refuse(
        "CPU threads per rank is " + std::to_string(*options.cpu_threads) +
        ", must be at least 1.");
  }
  if (options.stop_grace.count() < 0 || options.interrupt_grace.count() < 0) {
    refuse("the grace period for stopping is negative.");
  }
  if (options.join_timeout.count() <= 0) {
    refuse("the join timeout must be greater than 0.");
  }
  if (options.log_dir && options.log_dir->empty()) {
    refuse("the log folder is an empty path. Name a folder or leave it out.");
  }
  validate_extra_env(options);
}

int default_cpu_threads(int ranks_per_node) {
  return std::max(1, bound_cores() / std::max(1, ranks_per_node));
}

} // namespace tessera::launch
