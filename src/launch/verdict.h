#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"

namespace tessera::launch {

/// How an attempt ended on one node.
enum class Ending {
  Succeeded, ///< Every rank exited 0.
  Failed, ///< A rank failed by itself; the others were stopped.
  Interrupted, ///< The user stopped this launcher.
  Stopped, ///< Another node asked for the stop.
  Error, ///< The launcher could not go on (program, console, logs).
};

/// What a node tells the others about an attempt.
struct NodeReport {
  Ending ending = Ending::Succeeded;
  /// 0 exactly if kSucceeded.
  int exit_code = 0;
  /// False if something happened here that a restart cannot mend.
  bool may_restart = true;
  /// When the cause was seen, by this host's clock: microseconds since 1970.
  int64_t time_us = 0;
  /// For the user; empty if kSucceeded or kStopped.
  std::string text;
};

/// For NodeReport::time_us.
int64_t now_us();

enum class Action { Done, Restart, Fail };

/// What all nodes do after an attempt.
struct Verdict {
  Action action = Action::Done;
  int exit_code = 0;
  /// The node whose report is the cause; -1 if kDone.
  int node_rank = -1;
  std::string text;
};

/// The earliest cause wins; hosts are taken to have synchronized clocks. A
/// failure leads to a restart if one is left and no report forbids it.
/// `reports` is indexed by node.
Verdict decide(
    std::span<const NodeReport> reports,
    int attempt,
    int max_restarts);

/// What encode_fields() joined. Throws std::runtime_error unless there are
/// exactly `count` whole fields.
std::vector<std::string> decode_fields(std::string_view bytes, size_t count);

std::string encode(const NodeReport& report);
std::string encode(const Verdict& verdict);
/// Throw std::runtime_error if the bytes are not what encode() wrote.
NodeReport decode_report(std::string_view bytes);
Verdict decode_verdict(std::string_view bytes);

} // namespace tessera::launch
