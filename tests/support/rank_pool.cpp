#include "support/rank_pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <system_error>
#include <utility>

extern char** environ;

namespace tessera::testing {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// For workers to start and to make their world.
constexpr milliseconds kStartTime{120'000};
/// After the first failure the other ranks get this long to report theirs.
constexpr milliseconds kAfterFailure{10'000};
/// Time for hanging workers to say where they stand; all but a stuck process
/// take milliseconds.
constexpr milliseconds kDumpTime{20'000};
constexpr size_t kMaxLog = 20'000;

[[noreturn]] void throw_errno(const char* step) {
  throw std::system_error(errno, std::generic_category(), step);
}

std::vector<std::string> worker_environment(int rank, int socket) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    // A worker runs one test at a time and writes no report.
    if (!text.starts_with("GTEST_") && !text.starts_with("TEST_")) {
      result.emplace_back(text);
    }
  }
  result.push_back("TESSERA_TEST_RANK=" + std::to_string(rank));
  result.push_back("TESSERA_TEST_SOCKET=" + std::to_string(socket));
  result.push_back("OMP_NUM_THREADS=1");
  return result;
}

std::string seconds_text(milliseconds time) {
  std::ostringstream text;
  text << static_cast<double>(time.count()) / 1000 << " s";
  return text.str();
}

std::string describe_end(int status) {
  if (WIFEXITED(status)) {
    return "exited with code " + std::to_string(WEXITSTATUS(status));
  }
  return std::string("was killed by ") + strsignal(WTERMSIG(status));
}

} // namespace

RankPool::RankPool(int size) {
  comm::StoreEndpoint endpoint{"127.0.0.1", 0};
  store_ = comm::host_store(endpoint, std::chrono::minutes(5));
  store_port_ = endpoint.port;
  for (int rank = 0; rank < size; ++rank) {
    start(rank);
  }
}

RankPool::~RankPool() {
  for (Worker& worker : workers_) {
    shutdown(worker.socket, SHUT_RDWR); // an idle worker exits by itself
  }
  const auto deadline = Clock::now() + milliseconds(healthy_ ? 2000 : 0);
  for (Worker& worker : workers_) {
    pid_t ended = 0;
    while (worker.pid > 0 &&
           (ended = waitpid(worker.pid, nullptr, WNOHANG)) == 0 &&
           Clock::now() < deadline) {
      usleep(1000);
    }
    worker.pid = ended == 0 ? worker.pid : -1;
  }
  kill_all();
}

void RankPool::kill_all() {
  for (Worker& worker : workers_) {
    if (worker.pid > 0) {
      kill(worker.pid, SIGKILL);
      waitpid(worker.pid, nullptr, 0);
    }
    close(worker.socket);
    close(worker.log);
  }
  workers_.clear();
}

std::vector<pid_t> RankPool::pids() const {
  std::vector<pid_t> result;
  for (const Worker& worker : workers_) {
    result.push_back(worker.pid);
  }
  return result;
}

void RankPool::start(int rank) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_errno("socketpair");
  }
  Worker worker{.rank = rank, .socket = ends[0]};
  worker.log = memfd_create("worker log", MFD_CLOEXEC);
  if (worker.log < 0) {
    throw_errno("memfd_create");
  }
  fcntl(worker.log, F_SETFL, O_APPEND);
  // Everything is allocated before the fork: this process has threads.
  auto environment = worker_environment(rank, ends[1]);
  std::vector<char*> envp;
  for (std::string& entry : environment) {
    envp.push_back(entry.data());
  }
  envp.push_back(nullptr);
  char name[] = "worker";
  char* argv[] = {name, nullptr};
  worker.pid = fork();
  if (worker.pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fcntl(ends[1], F_SETFD, 0); // the worker keeps its end
    dup2(worker.log, 1);
    dup2(worker.log, 2);
    execve("/proc/self/exe", argv, envp.data());
    _exit(127);
  }
  close(ends[1]);
  if (worker.pid < 0) {
    throw_errno("fork");
  }
  workers_.push_back(worker);
}

bool RankPool::run(const std::string& test, milliseconds timeout) {
  const std::string prefix = "run" + std::to_string(num_runs_++);
  for (Worker& worker : workers_) {
    worker.log_begin = lseek(worker.log, 0, SEEK_END);
    worker.running = true;
    worker.started = false;
    send_message(
        worker.socket,
        {Message::Kind::Run, {test, prefix, std::to_string(store_port_)}});
  }
  auto deadline = Clock::now() + kStartTime + timeout;
  std::string limit = seconds_text(kStartTime + timeout);
  bool started = false;
  bool shortened = false;
  while (true) {
    std::vector<pollfd> waits;
    std::vector<Worker*> waited;
    for (Worker& worker : workers_) {
      if (worker.running) {
        waits.push_back({worker.socket, POLLIN, 0});
        waited.push_back(&worker);
      }
    }
    if (waits.empty()) {
      return healthy_;
    }
    const auto now = Clock::now();
    if (!started && all_started()) {
      started = true;
      deadline = now + timeout;
      limit = seconds_text(timeout);
    }
    if (!healthy_ && !shortened && now + kAfterFailure < deadline) {
      shortened = true;
      deadline = now + kAfterFailure;
      limit = seconds_text(kAfterFailure) + " after the first failure";
    }
    if (now >= deadline) {
      healthy_ = false;
      report_hang(limit);
      kill_all();
      return false;
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - now);
    poll(waits.data(), waits.size(), static_cast<int>(left.count()));
    for (size_t i = 0; i < waits.size(); ++i) {
      if (waits[i].revents != 0) {
        take_message(*waited[i]);
      }
    }
  }
}

void RankPool::take_message(Worker& worker) {
  const auto message = receive_message(worker.socket);
  if (!message) {
    report_death(worker);
    return;
  }
  switch (message->kind) {
    case Message::Kind::Started:
      worker.started = true;
      break;
    case Message::Kind::Failure:
      healthy_ = false;
      ADD_FAILURE_AT(
          message->fields.at(0).c_str(), std::stoi(message->fields.at(1)))
          << "[rank " << worker.rank << "] " << message->fields.at(2);
      break;
    case Message::Kind::Property:
      if (worker.rank == 0) {
        ::testing::Test::RecordProperty(
            message->fields.at(0), message->fields.at(1));
      }
      break;
    case Message::Kind::Done:
      worker.running = false;
      if (message->fields.at(0) == "0") {
        healthy_ = false;
        ADD_FAILURE() << "[rank " << worker.rank << "] ran nothing: no test of "
                      << "this name there, or it never came to on_ranks()";
      }
      break;
    case Message::Kind::Run:
      break; // the controller's own
  }
}

void RankPool::report_death(Worker& worker) {
  healthy_ = false;
  worker.running = false;
  int status = 0;
  waitpid(std::exchange(worker.pid, -1), &status, 0);
  ADD_FAILURE() << "[rank " << worker.rank << "] the process "
                << describe_end(status) << ". Its output:\n"
                << log_of(worker);
}

bool RankPool::all_started() const {
  return std::all_of(
      workers_.begin(), workers_.end(), [](const Worker& worker) {
        return worker.started || !worker.running;
      });
}

/// Returns once every worker that was asked has said where it stands.
void RankPool::wait_for_dumps() const {
  const auto deadline = Clock::now() + kDumpTime;
  const auto has_answered = [this](const Worker& worker) {
    return !worker.running ||
        log_of(worker).find(kEndOfDump) != std::string::npos;
  };
  while (!std::all_of(workers_.begin(), workers_.end(), has_answered) &&
         Clock::now() < deadline) {
    usleep(10'000);
  }
}

void RankPool::report_hang(const std::string& limit) {
  for (const Worker& worker : workers_) {
    if (worker.running) {
      kill(worker.pid, SIGUSR1); // answered into its log
    }
  }
  wait_for_dumps();
  std::ostringstream report;
  report << "not all ranks finished within " << limit << ":\n";
  for (const Worker& worker : workers_) {
    report << "[rank " << worker.rank << "] "
           << (worker.running ? "did not finish. Its output:\n" + log_of(worker)
                              : std::string("finished"))
           << "\n";
  }
  ADD_FAILURE() << report.str();
}

std::string RankPool::log_of(const Worker& worker) const {
  const off_t end = lseek(worker.log, 0, SEEK_END);
  const off_t begin =
      std::max(worker.log_begin, end - static_cast<off_t>(kMaxLog));
  std::string text(static_cast<size_t>(end - begin), '\0');
  const ssize_t count = pread(worker.log, text.data(), text.size(), begin);
  text.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  return text.empty() ? "(nothing)" : text;
}

} // namespace tessera::testing
