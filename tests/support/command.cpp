#include "support/command.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <stdexcept>
#include <system_error>

extern char** environ;

namespace tessera::testing {
namespace {

using Clock = std::chrono::steady_clock;

/// Limits are meant for an idle machine; a test that takes this much longer
/// hangs.
constexpr int kPatience = 5;

std::vector<std::string> merged_environment(const CommandOptions& options) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (!options.environment.contains(text.substr(0, text.find('=')))) {
      result.push_back(text);
    }
  }
  for (const auto& [name, value] : options.environment) {
    if (value) {
      result.push_back(name + "=" + *value);
    }
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) {
    result.push_back(text.data());
  }
  result.push_back(nullptr);
  return result;
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - Clock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

} // namespace

Command::Command(
    const std::vector<std::string>& words,
    const CommandOptions& options)
    : started_(Clock::now()),
      deadline_(started_ + kPatience * options.timeout) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw std::system_error(errno, std::generic_category(), "pipe2");
  }
  auto arguments = words;
  auto environment = merged_environment(options);
  const auto argv = pointers(arguments);
  const auto envp = pointers(environment);
  pid_ = fork();
  if (pid_ == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    execvpe(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  close(ends[1]);
  output_ = ends[0];
  if (pid_ < 0) {
    throw std::system_error(errno, std::generic_category(), "fork");
  }
}

Command::~Command() {
  if (pid_ > 0) {
    kill_tree();
  }
  close(output_);
}

int Command::kill_tree() {
  // Stopped first, since a stopped process cannot start others meanwhile.
  kill(pid_, SIGSTOP);
  std::set<pid_t> below;
  bool is_growing = true;
  while (is_growing) {
    is_growing = false;
    for (const auto& process : tree_.descendants()) {
      if ((process.parent == pid_ || below.contains(process.parent)) &&
          below.insert(process.pid).second) {
        kill(process.pid, SIGSTOP);
        is_growing = true;
      }
    }
  }
  kill(-pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  for (const pid_t pid : below) {
    kill(pid, SIGKILL);
  }
  // The harness made this process their subreaper; otherwise they are not ours.
  for (const pid_t pid : below) {
    waitpid(pid, nullptr, 0);
  }
  return status;
}

bool Command::read_some() {
  pollfd readable{output_, POLLIN, 0};
  if (poll(&readable, 1, milliseconds_until(deadline_)) <= 0) {
    return false;
  }
  char buffer[1 << 14];
  const ssize_t count = read(output_, buffer, sizeof buffer);
  if (count <= 0) {
    return false;
  }
  collected_.append(buffer, static_cast<size_t>(count));
  return true;
}

bool Command::wait_for_output(const std::string& text) {
  while (collected_.find(text) == std::string::npos) {
    if (!read_some()) {
      return false;
    }
  }
  return true;
}

CommandResult Command::wait() {
  while (read_some()) {
  }
  CommandResult result;
  int status = 0;
  pid_t ended = 0;
  while ((ended = waitpid(pid_, &status, WNOHANG)) == 0 &&
         Clock::now() < deadline_) {
    usleep(2000);
  }
  if (ended == 0) {
    result.timed_out = true;
    status = kill_tree();
  }
  kill(-pid_, SIGKILL); // what it may have left in its group
  pid_ = -1;
  result.exit_code =
      WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  result.output = std::move(collected_);
  result.seconds =
      std::chrono::duration<double>(Clock::now() - started_).count();
  return result;
}

CommandResult run_command(
    const std::vector<std::string>& words,
    const CommandOptions& options) {
  return Command(words, options).wait();
}

int num_times(const std::string& text, const std::string& what) {
  int times = 0;
  for (size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + 1)) {
    ++times;
  }
  return times;
}

std::vector<std::string> run_on_node_of_two(
    int node,
    const std::string& endpoint) {
  return {
      tessera_program(),
      "run",
      "-n",
      "1",
      "--nnodes",
      "2",
      "--node-rank",
      std::to_string(node),
      "--rdzv-endpoint",
      endpoint};
}

std::string bin_dir() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  const std::string self(
      path, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  return self.substr(0, self.rfind('/'));
}

std::string tessera_program() {
  return bin_dir() + "/tessera";
}

std::map<std::string, std::optional<std::string>> without_launcher() {
  std::map<std::string, std::optional<std::string>> result;
  for (const char* name :
       {"RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT"}) {
    result[name] = std::nullopt;
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    for (const char* prefix : {"SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_"}) {
      if (text.starts_with(prefix)) {
        result[text.substr(0, text.find('='))] = std::nullopt;
      }
    }
  }
  return result;
}

} // namespace tessera::testing
