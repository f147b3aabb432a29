#include "support/ranks.h"

#include <tessera/comm/init.h>

#include <ATen/Context.h>

#include <execinfo.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/diagnostics/current_call.h"
#include "launch/process_tree.h"
#include "support/rank_pool.h"

namespace tessera::testing {
namespace {

constexpr int kPoolSize = 4;
/// Limits are meant for an idle machine; a test that takes this much longer
/// hangs.
constexpr int kPatience = 3;
/// No test takes this long, on any machine: it hangs.
constexpr std::chrono::seconds kControllerTimeout{900};

// ---- Worker ---------------------------------------------------------------

/// What the controller told this worker to run.
struct Assignment {
  std::string prefix;
  int store_port = 0;
  int num_worlds = 0; // on_ranks() calls so far
};

struct WorkerState {
  int rank = -1;
  int socket = -1;
  Assignment assignment;
};

WorkerState& worker() {
  static WorkerState state;
  return state;
}

/// SIGUSR1: say where this process stands. Async-signal-safe, but for
/// backtrace(), which has been called once before and then allocates nothing.
void say_where_it_stands(int) {
  char text[512];
  size_t length = comm::describe_current_call(text, sizeof text - 1);
  text[length++] = '\n';
  ssize_t written = write(2, text, length);
  void* frames[48];
  backtrace_symbols_fd(frames, backtrace(frames, 48), 2);
  written = write(2, kEndOfDump, sizeof kEndOfDump - 1);
  static_cast<void>(written);
}

std::string command_line(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
  std::string text(std::istreambuf_iterator<char>(file), {});
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

/// Ends children that a test left behind; returns what they were.
std::string end_leftovers(
    const launch::ProcessTree& tree,
    const std::vector<pid_t>& known) {
  std::string left;
  for (const auto& process : tree.descendants()) {
    const bool is_known =
        std::find(known.begin(), known.end(), process.pid) != known.end() ||
        std::find(known.begin(), known.end(), process.parent) != known.end();
    if (is_known) {
      continue;
    }
    if (!process.zombie) {
      left += "  " + std::to_string(process.pid) + ": " +
          command_line(process.pid) + "\n";
    }
    kill(process.pid, SIGKILL);
    waitpid(process.pid, nullptr, 0);
  }
  return left;
}

/// A test draws the same random numbers whenever it runs, and on every rank.
class SameSeed : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo&) override {
    at::manual_seed(0);
  }
};

/// Sends the failed assertions of a worker's test to the controller.
class Reporter : public ::testing::EmptyTestEventListener {
 public:
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) {
      return;
    }
    const char* file = result.file_name();
    // LibTorch's errors include a stack trace.
    std::string text = result.message();
    if (const size_t trace = text.find("\nException raised from");
        trace != std::string::npos) {
      text.resize(trace);
    }
    send_message(
        worker().socket,
        {Message::Kind::Failure,
         {file == nullptr ? "unknown" : file,
          std::to_string(std::max(result.line_number(), 0)),
          text}});
  }

  void OnTestEnd(const ::testing::TestInfo& info) override {
    const auto* result = info.result();
    for (int i = 0; i < result->test_property_count(); ++i) {
      const auto& property = result->GetTestProperty(i);
      send_message(
          worker().socket,
          {Message::Kind::Property, {property.key(), property.value()}});
    }
  }
};

int run_worker(int argc, char** argv) {
  worker().rank = std::atoi(std::getenv("TESSERA_TEST_RANK"));
  worker().socket = std::atoi(std::getenv("TESSERA_TEST_SOCKET"));
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  void* frame[1];
  backtrace(frame, 1); // loads what it needs
  signal(SIGUSR1, say_where_it_stands);

  ::testing::InitGoogleTest(&argc, argv);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new Reporter);
  listeners.Append(new SameSeed);
  const launch::ProcessTree tree;
  while (auto message = receive_message(worker().socket)) {
    worker().assignment = {
        message->fields.at(1), std::stoi(message->fields.at(2)), 0};
    GTEST_FLAG_SET(filter, message->fields.at(0));
    const int result = RUN_ALL_TESTS();
    static_cast<void>(result); // the reporter has sent what failed
    shutdown();
    const std::string left = end_leftovers(tree, {});
    if (!left.empty()) {
      send_message(
          worker().socket,
          {Message::Kind::Failure,
           {"unknown", "0", "the test left processes running:\n" + left}});
    }
    send_message(
        worker().socket,
        {Message::Kind::Done,
         {std::to_string(worker().assignment.num_worlds)}});
  }
  return 0;
}

void run_in_worker(
    const RanksOptions& options,
    const std::function<void(const Group&)>& body) {
  Assignment& assignment = worker().assignment;
  const std::string prefix =
      assignment.prefix + "." + std::to_string(assignment.num_worlds++);
  if (worker().rank >= options.size || ::testing::Test::HasFailure()) {
    return;
  }
  const Group world = init(InitOptions()
                               .rank(worker().rank)
                               .world_size(options.size)
                               .master_addr("127.0.0.1")
                               .master_port(assignment.store_port)
                               .store_is_hosted(true)
                               .store_prefix(prefix)
                               .backend(options.backend)
                               .timeout(options.timeout));
  at::manual_seed(0);
  if (assignment.num_worlds == 1) {
    send_message(worker().socket, {Message::Kind::Started, {}});
  }
  body(world);
  if (!::testing::Test::HasFatalFailure()) {
    world.barrier("end of on_ranks");
  }
  shutdown();
}

// ---- Controller -----------------------------------------------------------

std::unique_ptr<RankPool>& pool() {
  static std::unique_ptr<RankPool> instance;
  return instance;
}

std::string current_test() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(info->test_suite_name()) + "." + info->name();
}

/// Ends the binary when a test takes too long, and says which.
class Watchdog : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo& info) override {
    std::lock_guard lock(mutex_);
    name_ = std::string(info.test_suite_name()) + "." + info.name();
    deadline_ = std::chrono::steady_clock::now() + kControllerTimeout;
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { watch(); });
    }
  }

  void OnTestEnd(const ::testing::TestInfo&) override {
    std::lock_guard lock(mutex_);
    name_.clear();
  }

  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(
        lock, std::chrono::seconds(1), [this] { return stopping_; })) {
      if (!name_.empty() && std::chrono::steady_clock::now() > deadline_) {
        std::cerr << "[watchdog] " << name_ << " did not end within "
                  << kControllerTimeout.count() << " s" << std::endl;
        std::abort();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  std::string name_; // guarded by mutex_
  std::chrono::steady_clock::time_point deadline_; // guarded by mutex_
  bool stopping_ = false; // guarded by mutex_
};

/// Tests own their children, so that none outlives its test.
class LeftoverCheck : public ::testing::EmptyTestEventListener {
 public:
  void OnTestEnd(const ::testing::TestInfo&) override {
    const auto known = pool() ? pool()->pids() : std::vector<pid_t>{};
    const std::string left = end_leftovers(tree_, known);
    if (!left.empty()) {
      ADD_FAILURE() << "the test left processes running:\n" << left;
    }
  }

 private:
  launch::SubreaperScope subreaper_;
  launch::ProcessTree tree_;
};

std::string& test_that_ran() {
  static std::string name;
  return name;
}

class NewTest : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo&) override {
    test_that_ran().clear();
  }
};

void run_in_pool(const RanksOptions& options) {
  if (test_that_ran() == current_test()) {
    return; // the workers have run the whole test already
  }
  test_that_ran() = current_test();
  if (!pool() || pool()->size() < options.size) {
    pool() = std::make_unique<RankPool>(std::max(kPoolSize, options.size));
  }
  if (!pool()->run(current_test(), kPatience * options.test_timeout)) {
    pool().reset();
  }
}

int run_controller(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  listeners.Append(new Watchdog);
  listeners.Append(new LeftoverCheck);
  listeners.Append(new NewTest);
  listeners.Append(new SameSeed);
  const int result = RUN_ALL_TESTS();
  pool().reset();
  return result;
}

} // namespace

bool in_worker() {
  return worker().rank >= 0;
}

void on_ranks(
    const RanksOptions& options,
    const std::function<void(const Group&)>& body) {
  if (in_worker()) {
    run_in_worker(options, body);
  } else {
    run_in_pool(options);
  }
}

void on_ranks(int size, const std::function<void(const Group&)>& body) {
  on_ranks(RanksOptions{.size = size}, body);
}

int run_tests(int argc, char** argv) {
  return std::getenv("TESSERA_TEST_RANK") != nullptr
      ? run_worker(argc, argv)
      : run_controller(argc, argv);
}

} // namespace tessera::testing
