#include "launch/local_ranks.h"

#include <signal.h>

#include <algorithm>

namespace tessera::launch {

LocalRanks::~LocalRanks() {
  for (LocalRank& rank : ranks_) {
    if (rank.process.pidfd() >= 0) {
      rank.process.signal_group(SIGKILL);
      pollfd ended{.fd = rank.process.pidfd(), .events = POLLIN, .revents = 0};
      ::poll(&ended, 1, static_cast<int>(kUnkillableAfter.count()));
      rank.process.reap();
    }
  }
}

void LocalRanks::start(const AttemptPlan& plan, Frontend* frontend) {
  for (int local_rank = 0; local_rank < options_.ranks_per_node; ++local_rank) {
    OutputPlan output{
        .rank = options_.global_rank(local_rank),
        .world_size = options_.world_size(),
        .log_dir = std::nullopt,
        .print = !plan.log_dir || options_.tee};
    if (plan.log_dir) {
      output.log_dir = *plan.log_dir /
          ("attempt_" + std::to_string(plan.attempt)) /
          ("rank_" + std::to_string(output.rank));
    }
    outputs_.push_back(
        std::make_unique<RankOutput>(output, &frontend->console));
  }
  std::vector<std::string> argv{options_.program};
  argv.insert(argv.end(), options_.args.begin(), options_.args.end());
  for (int local_rank = 0; local_rank < options_.ranks_per_node; ++local_rank) {
    RankOutput* output = outputs_[static_cast<size_t>(local_rank)].get();
    const SpawnRequest request{
        .argv = argv,
        .environment = rank_environment(
            options_,
            plan.base_environment,
            plan.endpoint,
            plan.attempt,
            local_rank,
            plan.log_dir ? 0 : frontend->console.live_columns()),
        .stdout_fd = output->rank_fd(Stream::Stdout),
        .stderr_fd = output->rank_fd(Stream::Stderr),
        .signal_mask = frontend->signals.rank_mask()};
    ranks_.push_back(LocalRank{
        .process = Process::spawn(request),
        .output = output,
        .started = LocalRank::Clock::now(),
        .ended = {},
        .end = std::nullopt});
    output->close_rank_ends();
  }
}

std::vector<size_t> LocalRanks::add_to_poll(std::vector<pollfd>* fds) const {
  std::vector<size_t> running;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].end) {
      running.push_back(i);
      fds->push_back(
          {.fd = ranks_[i].process.pidfd(), .events = POLLIN, .revents = 0});
    }
  }
  return running;
}

void LocalRanks::signal(int signal) const {
  for (const LocalRank& rank : ranks_) {
    rank.process.signal_group(signal);
  }
}

void LocalRanks::signal_strays(int signal) const {
  const std::set<pid_t> ranks = pids();
  for (const ProcessInfo& process : live_descendants()) {
    if (!ranks.contains(process.group)) {
      ::kill(process.pid, signal);
    }
  }
}

std::vector<ProcessInfo> LocalRanks::live_descendants() const {
  std::vector<ProcessInfo> result = tree_.descendants();
  std::erase_if(
      result, [](const ProcessInfo& process) { return process.zombie; });
  return result;
}

std::set<pid_t> LocalRanks::pids() const {
  std::set<pid_t> result;
  for (const LocalRank& rank : ranks_) {
    result.insert(rank.process.pid());
  }
  return result;
}

size_t LocalRanks::num_running() const {
  return static_cast<size_t>(
      std::count_if(ranks_.begin(), ranks_.end(), [](const LocalRank& rank) {
        return !rank.end.has_value();
      }));
}

void LocalRanks::reap() {
  for (LocalRank& rank : ranks_) {
    rank.process.reap();
  }
}

FailureReport LocalRanks::failure_report(size_t failed, int attempt) const {
  const LocalRank& first = ranks_[failed];
  // Where all ranks fail alike, often one alone says why.
  const auto prints = [](const LocalRank& rank) {
    return !rank.output->last_lines().empty();
  };
  const auto other = std::find_if(ranks_.begin(), ranks_.end(), prints);
  const LocalRank& speaker =
      prints(first) || other == ranks_.end() ? first : *other;
  FailureReport report{
      .first = *first.end,
      .pid = first.process.pid(),
      .seconds =
          std::chrono::duration<double>(first.ended - first.started).count(),
      .attempt = attempt,
      .speaker = speaker.end->rank,
      .last_lines = speaker.output->last_lines(),
      .log_path = speaker.output->last_lines_log().string(),
      .others = {}};
  for (const LocalRank& rank : ranks_) {
    if (&rank != &first) {
      report.others.push_back(*rank.end);
    }
  }
  return report;
}

} // namespace tessera::launch
