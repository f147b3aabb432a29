// Runs the ranks of `tessera run` with the store through which they meet. Apart
// from its flags: a source that reads both CLI11 and LibTorch takes the
// compiler twice as long.
#pragma once

#include <string>

#include "launch/run_options.h"

namespace tessera::cli {

/// Hosts a store of its own for each attempt. Returns the exit code.
int run_on_one_node(const launch::RunOptions& options);

/// The same on one of several nodes; `endpoint` is HOST:PORT of node 0, where
/// the launchers meet. Throws launch::InvalidRunOptions if it is not.
int run_on_several_nodes(
    const launch::RunOptions& options,
    const std::string& endpoint);

} // namespace tessera::cli
