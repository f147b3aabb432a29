#pragma once

#include <string>
#include <vector>

#include "launch/run_options.h"

namespace tessera::launch {

/// Where the ranks of one attempt meet.
struct Endpoint {
  std::string address;
  int port = 0;
};

/// What node 0 tells the others at the beginning of an attempt.
struct AttemptStart {
  Endpoint endpoint;
  std::string launch; // folder of this launch's logs, below each log_dir
};

/// A copy of this process's environment, "NAME=value" each.
std::vector<std::string> current_environment();

/// Whether the launcher computes this variable for each rank (RANK and the
/// like), so that it may not be given from outside.
bool is_computed_variable(const std::string& name);

/// The environment of one rank, "NAME=value" each, sorted by name: `base`, over
/// it `options.extra_env`, over it torchrun's variables for that rank, and
/// TESSERA_LIVE where live lines of so many columns are shown.
std::vector<std::string> rank_environment(
    const RunOptions& options,
    const std::vector<std::string>& base,
    const Endpoint& endpoint,
    int attempt,
    int local_rank,
    int live_columns = 0);

} // namespace tessera::launch
