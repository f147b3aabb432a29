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
// A process that is stuck in the kernel cannot be killed; after this long it
// is left behind and named.
constexpr milliseconds kUnkillableAfter{10000};

double to_seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

int64_t now_us() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

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
      nodes_(nodes) {}

Attempt::~Attempt() {
  for (Rank& rank : ranks_) {
    if (rank.process.pidfd() >= 0) {
      rank.process.signal_group(SIGKILL);
      pollfd ended{.fd = rank.process.pidfd(), .events = POLLIN, .revents = 0};
      ::poll(&ended, 1, static_cast<int>(kUnkillableAfter.count()));
      rank.process.reap();
    }
  }
}

AttemptResult Attempt::run() {
  try {
    open_outputs();
    start_ranks();
  } catch (const OutputError& error) {
    fail_with(error.what(), kExitLauncherError);
  } catch (const SpawnError& error) {
    fail_with(error.what(), error.exit_code());
  }
  while (!is_over()) {
    step();
  }
  collect_output();
  for (Rank& rank : ranks_) {
    rank.process.reap();
  }
  tree_.reap_orphans({});
  return make_result();
}

void Attempt::open_outputs() {
  for (int local_rank = 0; local_rank < options_.ranks_per_node; ++local_rank) {
    OutputPlan output{
        .rank = options_.global_rank(local_rank),
        .world_size = options_.world_size(),
        .log_dir = std::nullopt,
        .print = !plan_.log_dir || options_.tee};
    if (plan_.log_dir) {
      output.log_dir = *plan_.log_dir /
          ("attempt_" + std::to_string(plan_.attempt)) /
          ("rank_" + std::to_string(output.rank));
    }
    outputs_.push_back(
        std::make_unique<RankOutput>(output, &frontend_->console));
  }
}

void Attempt::start_ranks() {
  std::vector<std::string> argv{options_.program};
  argv.insert(argv.end(), options_.args.begin(), options_.args.end());
  for (int local_rank = 0; local_rank < options_.ranks_per_node; ++local_rank) {
    RankOutput* output = outputs_[static_cast<size_t>(local_rank)].get();
    const SpawnRequest request{
        .argv = argv,
        .environment = rank_environment(
            options_,
            plan_.base_environment,
            plan_.endpoint,
            plan_.attempt,
            local_rank,
            plan_.log_dir ? 0 : frontend_->console.live_columns()),
        .stdout_fd = output->rank_fd(Stream::Stdout),
        .stderr_fd = output->rank_fd(Stream::Stderr),
        .signal_mask = frontend_->signals.rank_mask()};
    ranks_.push_back(Rank{
        .process = Process::spawn(request),
        .output = output,
        .started = Clock::now(),
        .ended = {},
        .end = std::nullopt});
    output->close_rank_ends();
  }
}

void Attempt::step() {
  std::vector<pollfd> fds{
      {.fd = frontend_->signals.fd(), .events = POLLIN, .revents = 0}};
  frontend_->console.add_to_poll(&fds);

  const size_t first_rank_fd = fds.size();
  std::vector<size_t> watched;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].end) {
      watched.push_back(i);
      fds.push_back(
          {.fd = ranks_[i].process.pidfd(), .events = POLLIN, .revents = 0});
    }
  }
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
  if (num_running() == 0) {
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
  const std::set<pid_t> ranks = rank_pids();
  if (child_event && !ranks.contains(first_to_end_)) {
    tree_.reap_orphans(ranks);
  }
}

void Attempt::take_signal(int signal) {
  switch (signal) {
    case SIGTSTP:
      signal_ranks(SIGSTOP);
      ::raise(SIGSTOP);
      return;
    case SIGHUP:
      has_hung_up_ = true;
      signal_ranks(signal);
      return;
    case SIGUSR1:
    case SIGUSR2:
    case SIGCONT:
      signal_ranks(signal);
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
    signal_ranks(signal);
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
    Rank& rank = ranks_[i];
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
      end.stop_seconds = to_seconds(rank.ended - stop_began_);
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
  if (num_running() > 0) {
    return false;
  }
  tree_.reap_orphans(rank_pids());
  const size_t num_left = live_descendants().size();
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
    signal_strays(SIGKILL);
    signal_ranks(SIGKILL);
  } else if (!std::exchange(strays_signalled_, true)) {
    signal_strays(SIGTERM);
  }
  return false;
}

void Attempt::begin_stop(int signal, milliseconds grace) {
  phase_ = Phase::Stopping;
  stop_began_ = Clock::now();
  deadline_ = stop_began_ + grace * 9 / 10;
  signal_ranks(signal);
  // A stopped process would see the signal only when it is continued.
  signal_ranks(SIGCONT);
  tell_nodes();
}

void Attempt::kill_all() {
  phase_ = Phase::Killing;
  deadline_ = Clock::now() + kUnkillableAfter;
  signal_ranks(SIGKILL);
  signal_strays(SIGKILL);
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

void Attempt::signal_ranks(int signal) const {
  for (const Rank& rank : ranks_) {
    rank.process.signal_group(signal);
  }
}

void Attempt::signal_strays(int signal) const {
  const std::set<pid_t> ranks = rank_pids();
  for (const ProcessInfo& process : live_descendants()) {
    if (!ranks.contains(process.group)) {
      ::kill(process.pid, signal);
    }
  }
}

std::vector<ProcessInfo> Attempt::live_descendants() const {
  std::vector<ProcessInfo> result = tree_.descendants();
  std::erase_if(
      result, [](const ProcessInfo& process) { return process.zombie; });
  return result;
}

std::set<pid_t> Attempt::rank_pids() const {
  std::set<pid_t> result;
  for (const Rank& rank : ranks_) {
    result.insert(rank.process.pid());
  }
  return result;
}

size_t Attempt::num_running() const {
  return static_cast<size_t>(
      std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
        return !rank.end.has_value();
      }));
}

void Attempt::collect_output() {
  frontend_->console.set_live("");
  for (Rank& rank : ranks_) {
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
    Rank& rank = ranks_[i];
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
    for (const ProcessInfo& process : live_descendants()) {
      unkillable += " " + std::to_string(process.pid);
    }
    fail_with("the ranks could not all be stopped.", kExitLauncherError);
    cause_.may_restart = false;
  }

  const std::string stopped = stopped_text(result.ends);
  switch (cause_.ending) {
    case Ending::Failed:
      cause_.text = failure_summary();
      break;
    case Ending::Interrupted:
      cause_.text = "interrupted by " + signal_name(cause_.exit_code - 128) +
          (options_.num_nodes > 1
               ? " on node " + std::to_string(options_.node_rank)
               : "") +
          (stopped.empty() ? "."
                           : "; the ranks were stopped: " + stopped + ".");
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

std::string Attempt::failure_summary() const {
  const Rank& first = ranks_[*failed_first_];
  // Where all ranks fail alike, often one alone says why.
  const auto prints = [](const Rank& rank) {
    return !rank.output->last_lines().empty();
  };
  const auto other = std::find_if(ranks_.begin(), ranks_.end(), prints);
  const Rank& speaker = prints(first) || other == ranks_.end() ? first : *other;
  FailureReport report{
      .first = *first.end,
      .pid = first.process.pid(),
      .seconds = to_seconds(first.ended - first.started),
      .attempt = plan_.attempt,
      .speaker = speaker.end->rank,
      .last_lines = speaker.output->last_lines(),
      .log_path = speaker.output->last_lines_log().string(),
      .others = {}};
  for (const Rank& rank : ranks_) {
    if (&rank != &first) {
      report.others.push_back(*rank.end);
    }
  }
  return failure_text(options_, report);
}

} // namespace tessera::launch
