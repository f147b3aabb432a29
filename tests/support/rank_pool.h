// The controller's side of tests on ranks.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "comm/store/store.h"
#include "support/messages.h"

namespace tessera::testing {

/// Worker processes of this binary, one per rank.
class RankPool {
 public:
  explicit RankPool(int size);
  /// Ends the workers.
  ~RankPool();
  RankPool(const RankPool&) = delete;
  RankPool& operator=(const RankPool&) = delete;

  int size() const {
    return static_cast<int>(workers_.size());
  }
  std::vector<pid_t> pids() const;

  /// Runs one test on all workers and reports their failures to GoogleTest.
  /// `timeout` counts from when all of them are in the test's body: how long
  /// processes take to start is the machine's business. Returns false if the
  /// pool cannot be used again.
  bool run(const std::string& test, std::chrono::milliseconds timeout);

 private:
  struct Worker {
    int rank = 0;
    pid_t pid = -1;
    int socket = -1;
    int log = -1; // its stdout and stderr
    off_t log_begin = 0; // where this test's output begins
    bool running = false;
    bool started = false; // this test's body
  };

  void start(int rank);
  void take_message(Worker& worker);
  bool all_started() const;
  void report_hang(const std::string& limit);
  void wait_for_dumps() const;
  void report_death(Worker& worker);
  std::string log_of(const Worker& worker) const;
  void kill_all();

  comm::StorePtr store_;
  int store_port_ = 0;
  int num_runs_ = 0;
  bool healthy_ = true;
  std::vector<Worker> workers_;
};

} // namespace tessera::testing
