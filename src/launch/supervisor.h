#pragma once

#include <functional>

#include "launch/launcher_channel.h"
#include "launch/rank_environment.h"
#include "launch/run_options.h"

namespace tessera::launch {

/// Called on node 0 before each attempt (0, 1, ...): opens a fresh meeting
/// point for the ranks and returns its address. The meeting point of the
/// attempt before may be closed: none of its ranks is left. An exception ends
/// the run.
using EndpointProvider = std::function<Endpoint(int attempt)>;

/// Where ranks' lines and the launcher's messages are written. Borrowed.
struct RunStreams {
  int out_fd = 1;
  int err_fd = 2;
};

/// Starts the ranks of this node, watches them until none of them nor of their
/// descendants is left, and starts all of them again where the options allow
/// it. Messages, among them a summary of the first failure, go to the error
/// stream.
///
/// Returns the exit code for the launcher: 0 if all ranks of all nodes exited
/// 0; else that of the rank that failed first, 128 plus the signal if one
/// killed it or if the user interrupted, 127 or 126 if the program could not
/// be started, 1 for errors of the launcher. All nodes return the same.
/// Throws InvalidRunOptions before anything is started, and also where
/// `channel` is null with several nodes.
///
/// One run at a time in a process, which owns every child that the process
/// gets meanwhile. Signal mask, actions and subreaper flag are as before
/// afterwards. A process with other threads calls block_supervised_signals()
/// before it starts them (launch/signals.h).
int run(
    const RunOptions& options,
    const EndpointProvider& endpoint_provider,
    LauncherChannel* channel = nullptr,
    RunStreams streams = {});

} // namespace tessera::launch
