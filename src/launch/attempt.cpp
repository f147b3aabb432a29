#include "launch/attempt.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <utility>

namespace tessera::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kNodeCheckInterval{100};
// While only orphans are left there is no descriptor that tells of their end.
constexpr milliseconds kOrphanCheckInterval{20};

} // namespace

Attempt::Attempt(
    const RunOptions& options,
    AttemptPlan plan,
    const ProcessTree& tree,
    Frontend* frontend,
    Nodes* nodes)
    : options_(options),
      plan_(std::move(plan)),
      tree_(tree),
      frontend_(frontend),
      nodes_(nodes),
      ranks_(options, tree) {}

AttemptResult Attempt::run() {
  try {
    ranks_.start(plan_, frontend_);
  } catch (const OutputError& error) {
    fail_with(error.what(), kExitLauncherError);
  } catch (const SpawnError& error) {
    fail_with(error.what(), error.exit_code());
  }
  while (!is_over()) {
    step();
  }
  collect_output();
  ranks_.reap();
  tree_.reap_orphans({});
  return make_result();
}

void Attempt::step() {
  std::vector<pollfd> fds{
      {.fd = frontend_->signals.fd(), .events = POLLIN, .revents = 0}};
  frontend_->console.add_to_poll(&fds);

  const size_t first_rank_fd = fds.size();
  const std::vector<size_t> watched = ranks_.add_to_poll(&fds);
  const size_t first_output_fd = fds.size();
  std::vector<std::pair<size_t, Stream>> readable;
  // A slow console slows the ranks down instead of filling memory.
  for (size_t i = 0; i < ranks_.size() && !frontend_->console.congested();
       ++i) {
    for (Stream stream : {Stream::Stdout, Stream::Stderr}) {
      const int fd = ranks_[i].output->read_fd(stream);
      if (fd >= 0) {
        readable.emplace_back(i, stream);
        fds.push_back({.fd = fd, .events = POLLIN, .revents = 0});
      }
    }
  }

  if (::poll(fds.data(), fds.size(), poll_timeout_ms()) > 0) {
    take_signals();
    for (size_t i = 0; i < readable.size(); ++i) {
      if (fds[first_output_fd + i].revents != 0) {
        take_output(readable[i].first, readable[i].second);
      }
    }
    std::vector<size_t> ended;
    for (size_t i = 0; i < watched.size(); ++i) {
      if (fds[first_rank_fd + i].revents != 0) {
        ended.push_back(watched[i]);
      }
    }
    take_exits(ended);
  }
  frontend_->console.write_some();
  check_console();
  check_nodes();
  check_deadline();
}

int Attempt::poll_timeout_ms() const {
  const Clock::time_point now = Clock::now();
  std::optional<Clock::time_point> wake;
  auto wake_by = [&](Clock::time_point time) {
    wake = wake ? std::min(*wake, time) : time;
  };
  if (phase_ != Phase::Running) {
    wake_by(deadline_);
  }
  if (nodes_ != nullptr && !channel_lost_) {
    wake_by(next_node_check_);
  }
  if (ranks_.num_running() == 0) {
    wake_by(now + kOrphanCheckInterval);
  }
  if (!wake) {
    return -1;
  }
  const auto left = std::chrono::ceil<milliseconds>(*wake - now);
  return static_cast<int>(
      std::clamp<milliseconds::rep>(left.count(), 0, 1000 * 1000));
}

void Attempt::take_signals() {
  first_to_end_ = 0;
  bool child_event = false;
  for (const signalfd_siginfo& info : frontend_->signals.take()) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal != SIGCHLD) {
      take_signal(signal);
      continue;
    }
    child_event = true;
    if (info.ssi_code == CLD_EXITED || info.ssi_code == CLD_KILLED ||
        info.ssi_code == CLD_DUMPED) {
      first_to_end_ = static_cast<pid_t>(info.ssi_pid);
    }
  }
  const std::set<pid_t> ranks = ranks_.pids();
  if (child_event && !ranks.contains(first_to_end_)) {
    tree_.reap_orphans(ranks);
  }
}

void Attempt::take_signal(int signal) {
  switch (signal) {
    case SIGTSTP:
      ranks_.signal(SIGSTOP);
      ::raise(SIGSTOP);
      return;
    case SIGHUP:
      has_hung_up_ = true;
      ranks_.signal(signal);
      return;
    case SIGUSR1:
    case SIGUSR2:
    case SIGCONT:
      ranks_.signal(signal);
      return;
    default:
      break;
  }
  if (!is_interrupt(signal)) {
    return;
  }
  ++num_interrupts_;
  cause_.may_restart = false;
  if (phase_ == Phase::Running) {
    set_cause(Ending::Interrupted, 128 + signal);
    begin_stop(signal, options_.interrupt_grace);
  } else if (signal == SIGINT && num_interrupts_ > 1) {
    kill_all();
  } else {
    ranks_.signal(signal);
  }
}

void Attempt::take_output(size_t local_rank, Stream stream) {
  try {
    ranks_[local_rank].output->read_some(stream);
  } catch (const OutputError& error) {
    fail_with(error.what(), kExitLauncherError);
  }
}

void Attempt::take_exits(const std::vector<size_t>& ready) {
  std::vector<size_t> order = ready;
  std::stable_partition(order.begin(), order.end(), [&](size_t i) {
    return ranks_[i].process.pid() == first_to_end_;
  });
  const bool was_running = phase_ == Phase::Running;
  for (size_t i : order) {
    LocalRank& rank = ranks_[i];
    const std::optional<ExitStatus> status = rank.process.poll_exit();
    if (!status) {
      continue;
    }
    rank.ended = Clock::now();
    RankEnd end{
        .rank = options_.global_rank(static_cast<int>(i)),
        .kind = RankEnd::Kind::Stopped,
        .status = *status,
        .stop_seconds = 0};
    if (!was_running) {
      end.stop_seconds =
          std::chrono::duration<double>(rank.ended - stop_began_).count();
    } else if (status->ok()) {
      end.kind = RankEnd::Kind::Finished;
    } else {
      end.kind = RankEnd::Kind::Failed;
      if (!failed_first_) {
        failed_first_ = i;
        set_cause(Ending::Failed, status->exit_code());
        // A user who hangs up does not want a restart.
        if (has_hung_up_ && status->signal == SIGHUP) {
          cause_.may_restart = false;
        }
      }
    }
    rank.end = end;
  }
  if (was_running && failed_first_) {
    begin_stop(SIGTERM, options_.stop_grace);
  }
}

void Attempt::check_console() {
  const std::string error = frontend_->console.error();
  if (!error.empty() && phase_ == Phase::Running) {
    fail_with(error, kExitLauncherError);
  }
}

void Attempt::check_nodes() {
  if (nodes_ == nullptr || channel_lost_ || Clock::now() < next_node_check_) {
    return;
  }
  next_node_check_ = Clock::now() + kNodeCheckInterval;
  try {
    // Also while stopping: the call is this node's sign of life.
    if (nodes_->stop_requested(plan_.attempt) && phase_ == Phase::Running) {
      set_cause(Ending::Stopped, kExitLauncherError);
      begin_stop(
          SIGTERM,
          nodes_->was_interrupted(plan_.attempt) ? options_.interrupt_grace
                                                 : options_.stop_grace);
    }
  } catch (const std::exception& error) {
    channel_lost_ = true;
    fail_with(error.what(), kExitLauncherError);
  }
}

void Attempt::check_deadline() {
  if (Clock::now() < deadline_) {
    return;
  }
  switch (phase_) {
    case Phase::Stopping:
      kill_all();
      return;
    case Phase::Killing:
      phase_ = Phase::Abandoned;
      return;
    case Phase::Running:
    case Phase::Abandoned:
      return;
  }
}

bool Attempt::is_over() {
  if (phase_ == Phase::Abandoned) {
    return true;
  }
  if (ranks_.num_running() > 0) {
    return false;
  }
  tree_.reap_orphans(ranks_.pids());
  const size_t num_left = ranks_.live_descendants().size();
  if (num_left == 0) {
    return true;
  }
  if (phase_ == Phase::Running) {
    frontend_->say(
        "all ranks have finished; stopping " + std::to_string(num_left) +
        " process(es) that they left running.");
    begin_stop(SIGTERM, options_.stop_grace);
  }
  if (phase_ == Phase::Killing) {
    // Again and again: a process may have forked since the last look.
    ranks_.signal_strays(SIGKILL);
    ranks_.signal(SIGKILL);
  } else if (!std::exchange(strays_signalled_, true)) {
    ranks_.signal_strays(SIGTERM);
  }
  return false;
}

void Attempt::begin_stop(int signal, milliseconds grace) {
  phase_ = Phase::Stopping;
  stop_began_ = Clock::now();
  deadline_ = stop_began_ + grace * 9 / 10;
  ranks_.signal(signal);
  // A stopped process would see the signal only when it is continued.
  ranks_.signal(SIGCONT);
  tell_nodes();
}

void Attempt::kill_all() {
  phase_ = Phase::Killing;
  deadline_ = Clock::now() + kUnkillableAfter;
  ranks_.signal(SIGKILL);
  ranks_.signal_strays(SIGKILL);
}

void Attempt::fail_with(const std::string& message, int exit_code) {
  if (cause_.ending == Ending::Succeeded) {
    set_cause(Ending::Error, exit_code);
    cause_.text = message;
    cause_.may_restart = false;
  }
  if (phase_ == Phase::Running) {
    begin_stop(SIGTERM, options_.stop_grace);
  }
}

void Attempt::set_cause(Ending ending, int exit_code) {
  cause_.ending = ending;
  cause_.exit_code = exit_code;
  cause_.time_us = now_us();
}

void Attempt::tell_nodes() {
  if (nodes_ == nullptr || channel_lost_ ||
      cause_.ending == Ending::Succeeded) {
    return;
  }
  try {
    nodes_->request_stop(plan_.attempt, cause_.ending);
  } catch (const std::exception&) {
    // The report that follows meets the same error, and says so.
  }
}

void Attempt::collect_output() {
  frontend_->console.set_live("");
  for (LocalRank& rank : ranks_) {
    try {
      rank.output->drain();
    } catch (const OutputError& error) {
      fail_with(error.what(), kExitLauncherError);
    }
  }
}

AttemptResult Attempt::make_result() {
  AttemptResult result;
  std::string unkillable;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    LocalRank& rank = ranks_[i];
    if (!rank.end) {
      rank.end = RankEnd{
          .rank = options_.global_rank(static_cast<int>(i)),
          .kind = RankEnd::Kind::Unkillable,
          .status = {},
          .stop_seconds = 0};
    }
    result.ends.push_back(*rank.end);
  }
  if (phase_ == Phase::Abandoned) {
    for (const ProcessInfo& process : ranks_.live_descendants()) {
      unkillable += " " + std::to_string(process.pid);
    }
    fail_with("the ranks could not all be stopped.", kExitLauncherError);
    cause_.may_restart = false;
  }

  const std::string stopped = stopped_text(result.ends);
  switch (cause_.ending) {
    case Ending::Failed:
      cause_.text = failure_text(
          options_, ranks_.failure_report(*failed_first_, plan_.attempt));
      break;
    case Ending::Interrupted:
      cause_.text = interrupted_text(options_, cause_.exit_code - 128, stopped);
      break;
    case Ending::Error:
      if (!stopped.empty()) {
        cause_.text += "\n  the ranks were stopped: " + stopped + ".";
      }
      break;
    case Ending::Succeeded:
    case Ending::Stopped:
      break;
  }
  if (!unkillable.empty()) {
    cause_.text += "\n  still there after SIGKILL, pid:" + unkillable +
        ". A driver may be stuck; see `ps -o pid,stat,wchan`.";
  }
  result.report = cause_;
  return result;
}

} // namespace tessera::launch
