#include "launch/nodes.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>

#include "launch/backoff.h"

namespace tessera::launch {
namespace {

using std::chrono::milliseconds;

constexpr const char* kProtocol = "tessera-run-2";
constexpr const char* kInterrupted = "interrupted";
constexpr const char* kFailed = "failed";
constexpr milliseconds kPollInterval{50};
constexpr std::chrono::seconds kBeatInterval{2};
constexpr std::chrono::seconds kInterruptPatience{2};
// Node 0 may wait before an attempt, and need some time to begin it.
constexpr milliseconds kStartTimeout = kLongestDelay + std::chrono::seconds(60);
// What a node may need beyond the stop grace: SIGKILL, logs, the network.
constexpr std::chrono::seconds kAnswerSlack{20};
constexpr std::chrono::seconds kLeaveSlack{5};

std::string node_key(int node) {
  return "node/" + std::to_string(node);
}

std::string attempt_key(int attempt, const std::string& name) {
  return std::to_string(attempt) + "/" + name;
}

std::string report_key(int attempt, int node) {
  return attempt_key(attempt, "report/" + std::to_string(node));
}

std::string make_identity() {
  char host[HOST_NAME_MAX + 1] = {};
  ::gethostname(host, sizeof(host) - 1);
  return std::string(host) + ", pid " + std::to_string(::getpid());
}

NodeReport lost_report(const std::string& text) {
  return NodeReport{
      .ending = Ending::Error,
      .exit_code = 1,
      .may_restart = false,
      .time_us = now_us(),
      .text = text};
}

} // namespace

Nodes::Nodes(
    const RunOptions& options,
    LauncherChannel* channel,
    Frontend* frontend)
    : options_(options),
      channel_(channel, kLostAfter),
      frontend_(frontend),
      identity_(make_identity()),
      peers_(static_cast<size_t>(options.num_nodes)) {}

void Nodes::abort(const std::string& message, int exit_code) noexcept {
  try {
    channel_.set_unless_set(
        "abort", encode_fields({std::to_string(exit_code), message}));
  } catch (const std::exception&) {
    // The channel is gone, and the other nodes notice that by themselves.
  }
}

void Nodes::abort_and_throw(const std::string& message) {
  abort(message, 1);
  throw NodesError(message);
}

void Nodes::throw_if_aborted() {
  if (const auto bytes = channel_.get("abort")) {
    const std::vector<std::string> fields = decode_fields(*bytes, 2);
    throw NodesError(fields[1], std::max(1, std::atoi(fields[0].c_str())));
  }
}

std::string Nodes::announcement() const {
  return encode_fields(
      {kProtocol,
       std::to_string(options_.num_nodes),
       std::to_string(options_.ranks_per_node),
       std::to_string(options_.max_restarts),
       options_.run_id,
       identity_});
}

void Nodes::check_peer(int node, const std::string& announced) {
  const std::vector<std::string> theirs = decode_fields(announced, 6);
  if (node == options_.node_rank && theirs.back() != identity_) {
    abort_and_throw(
        "node rank " + std::to_string(node) +
        " was given to two launchers: " + theirs.back() + " and " + identity_ +
        ". Give each node a rank of its own.");
  }
  const std::vector<std::pair<std::string, std::string>> expected{
      {"protocol", kProtocol},
      {"number of nodes", std::to_string(options_.num_nodes)},
      {"ranks per node", std::to_string(options_.ranks_per_node)},
      {"max restarts", std::to_string(options_.max_restarts)},
      {"run id", options_.run_id}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [what, mine] = expected[i];
    if (theirs[i] != mine) {
      abort_and_throw(
          "the nodes do not agree on the " + what + ": node " +
          std::to_string(node) + " has " + theirs[i] + ", node " +
          std::to_string(options_.node_rank) + " has " + mine +
          ". Start all nodes with the same options.");
    }
  }
}

std::string Nodes::missing_nodes() const {
  std::string result;
  for (size_t node = 0; node < peers_.size(); ++node) {
    if (!peers_[node].joined) {
      result += (result.empty() ? "" : ", ") + std::to_string(node);
    }
  }
  return result;
}

void Nodes::connect(Clock::time_point deadline) {
  while (const auto problem = channel_.connect()) {
    if (Clock::now() >= deadline) {
      throw NodesError(
          "waited " + seconds_text(options_.join_timeout) +
          " for the launcher of node 0: " + *problem +
          "\n  If it only starts later, raise the join timeout.");
    }
    frontend_->pause(kPollInterval);
  }
}

void Nodes::join() {
  const Clock::time_point deadline = Clock::now() + options_.join_timeout;
  connect(deadline);
  throw_if_aborted();
  channel_.set_unless_set(node_key(options_.node_rank), announcement());
  for (;;) {
    throw_if_aborted();
    for (size_t node = 0; node < peers_.size(); ++node) {
      if (peers_[node].joined) {
        continue;
      }
      if (const auto announced =
              channel_.get(node_key(static_cast<int>(node)))) {
        check_peer(static_cast<int>(node), *announced);
        peers_[node].joined = true;
      }
    }
    const std::string missing = missing_nodes();
    if (missing.empty()) {
      break;
    }
    if (Clock::now() >= deadline) {
      abort_and_throw(
          "waited " + seconds_text(options_.join_timeout) + " for node(s) " +
          missing + " of " + std::to_string(options_.num_nodes) +
          ". Start a launcher on each node, with the address of node 0, or "
          "raise the join timeout.");
    }
    frontend_->pause(kPollInterval);
  }
  for (Peer& peer : peers_) {
    peer.last_beat = Clock::now();
  }
}

void Nodes::publish_start(int attempt, const AttemptStart& start) {
  channel_.set(
      attempt_key(attempt, "start"),
      encode_fields(
          {start.endpoint.address,
           std::to_string(start.endpoint.port),
           start.launch}));
}

AttemptStart Nodes::await_start(int attempt) {
  const Clock::time_point deadline = Clock::now() + kStartTimeout;
  for (;;) {
    throw_if_aborted();
    beat();
    if (const auto bytes = channel_.get(attempt_key(attempt, "start"))) {
      const std::vector<std::string> fields = decode_fields(*bytes, 3);
      return AttemptStart{
          .endpoint =
              {.address = fields[0], .port = std::atoi(fields[1].c_str())},
          .launch = fields[2]};
    }
    if (Clock::now() >= deadline) {
      abort_and_throw(
          "node 0 did not say within " + seconds_text(kStartTimeout) +
          " where the ranks of attempt " + std::to_string(attempt) +
          " meet. Look at the output of its launcher.");
    }
    frontend_->pause(kPollInterval);
  }
}

void Nodes::wait(milliseconds duration) {
  const Clock::time_point end = Clock::now() + duration;
  while (Clock::now() < end) {
    throw_if_aborted();
    beat();
    frontend_->pause(kPollInterval);
  }
}

void Nodes::request_stop(int attempt, Ending ending) {
  channel_.set_unless_set( // the first cause counts
      attempt_key(attempt, "stop"),
      ending == Ending::Interrupted ? kInterrupted : kFailed);
}

bool Nodes::was_interrupted(int attempt) {
  return channel_.get(attempt_key(attempt, "stop")) == kInterrupted;
}

bool Nodes::stop_requested(int attempt) {
  beat();
  return any_lost() || channel_.get(attempt_key(attempt, "stop")).has_value() ||
      channel_.get("abort").has_value();
}

void Nodes::beat() {
  const Clock::time_point now = Clock::now();
  if (now < next_beat_) {
    return;
  }
  next_beat_ = now + kBeatInterval;
  if (!is_node0()) {
    channel_.set(
        "beat/" + std::to_string(options_.node_rank),
        std::to_string(++num_beats_));
    return;
  }
  for (size_t node = 1; node < peers_.size(); ++node) {
    Peer& peer = peers_[node];
    const std::string latest =
        channel_.get("beat/" + std::to_string(node)).value_or("");
    if (latest != peer.beat) {
      peer.beat = latest;
      peer.last_beat = now;
    } else if (now - peer.last_beat > kLostAfter) {
      peer.lost = true;
    }
  }
}

bool Nodes::any_lost() const {
  return std::any_of(
      peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.lost; });
}

Nodes::Clock::duration Nodes::answer_time() const {
  return std::max(options_.stop_grace, options_.interrupt_grace) + kAnswerSlack;
}

Verdict Nodes::agree(int attempt, const NodeReport& mine) {
  if (mine.ending == Ending::Interrupted) {
    channel_.set_patience(kInterruptPatience); // the user waits
  }
  channel_.set(report_key(attempt, options_.node_rank), encode(mine));
  if (mine.ending != Ending::Succeeded) {
    request_stop(attempt, mine.ending);
  }
  return is_node0() ? collect(attempt, mine) : await_verdict(attempt);
}

Verdict Nodes::collect(int attempt, const NodeReport& mine) {
  std::vector<std::optional<NodeReport>> reports(peers_.size());
  reports[0] = mine;
  std::optional<Clock::time_point> deadline;
  for (;;) {
    throw_if_aborted();
    const bool stopping = stop_requested(attempt);
    if (stopping && !deadline) {
      request_stop(attempt, Ending::Failed);
      deadline = Clock::now() + answer_time();
    }
    bool complete = true;
    for (size_t node = 1; node < peers_.size(); ++node) {
      if (reports[node]) {
        continue;
      }
      if (const auto bytes =
              channel_.get(report_key(attempt, static_cast<int>(node)))) {
        reports[node] = decode_report(*bytes);
      } else if (peers_[node].lost) {
        reports[node] = lost_report(
            "its launcher gave no sign of life for " +
            seconds_text(kLostAfter) + ". Is the host up?");
      } else if (deadline && Clock::now() >= *deadline) {
        peers_[node].lost = true;
        reports[node] = lost_report(
            "its launcher did not answer within " +
            seconds_text(answer_time()) + " of the stop. Is the host up?");
      } else {
        complete = false;
      }
    }
    if (complete) {
      break;
    }
    frontend_->pause(kPollInterval);
  }

  std::vector<NodeReport> all;
  for (const auto& report : reports) {
    all.push_back(*report);
  }
  const Verdict verdict = decide(all, attempt, options_.max_restarts);
  channel_.set(attempt_key(attempt, "verdict"), encode(verdict));
  return verdict;
}

Verdict Nodes::await_verdict(int attempt) {
  std::optional<Clock::time_point> deadline;
  for (;;) {
    throw_if_aborted();
    if (const auto bytes = channel_.get(attempt_key(attempt, "verdict"))) {
      return decode_verdict(*bytes);
    }
    if (!deadline && stop_requested(attempt)) {
      // Node 0 waits for the slowest node first, and then answers.
      deadline = Clock::now() + 2 * answer_time();
    }
    beat();
    if (deadline && Clock::now() >= *deadline) {
      abort_and_throw(
          "node 0 gave no verdict within " + seconds_text(2 * answer_time()) +
          " after attempt " + std::to_string(attempt) +
          ". Look at the output of its launcher.");
    }
    frontend_->pause(kPollInterval);
  }
}

void Nodes::leave() noexcept {
  try {
    if (!is_node0()) {
      channel_.set("left/" + std::to_string(options_.node_rank), "");
      return;
    }
    const Clock::time_point deadline =
        Clock::now() + answer_time() + kLeaveSlack;
    for (size_t node = 1; node < peers_.size(); ++node) {
      const std::string name = std::to_string(node);
      while (!peers_[node].lost &&
             channel_.get(node_key(static_cast<int>(node))) &&
             !channel_.get("left/" + name) && Clock::now() < deadline) {
        frontend_->pause(kPollInterval);
      }
    }
  } catch (const std::exception&) {
    // The channel is gone: nobody is left to wait for.
  } catch (const Interrupted&) {
    // A user who interrupts once more does not want to wait.
  }
}

} // namespace tessera::launch
