// Runs operations one after another, on whichever thread comes first.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"

namespace tessera::comm::shm {

/// [Note: who runs an operation]
///
/// Operations run strictly in the order they were given. A background thread
/// makes sure that they progress even if nobody waits. A thread that does wait
/// does not hand over to the background thread: it runs the operations that are
/// still ahead of its own, which saves two thread switches, and those cost more
/// than a small collective. It waits for its own operation alone: if that is
/// done, another thread may be in the next one, for long.
///
/// Thread safety: all members may be called from any thread.
class OpQueue {
 public:
  /// One operation's outcome.
  class Task {
   public:
    bool done() const {
      return done_.load(std::memory_order_acquire);
    }
    /// What the operation threw; null while it runs and when it succeeded.
    std::exception_ptr error() const {
      return done() ? error_ : nullptr;
    }

   private:
    friend class OpQueue;
    std::function<void()> run_; // dropped when done, with what it keeps alive
    std::function<void()> on_done_;
    std::exception_ptr error_;
    std::atomic<bool> done_{false};
  };
  using TaskPtr = std::shared_ptr<Task>;

  OpQueue() = default;
  ~OpQueue();

  OpQueue(const OpQueue&) = delete;
  OpQueue& operator=(const OpQueue&) = delete;

  /// Queues `run`. `on_done` is called once, after it, on the thread that ran
  /// it; neither may touch the queue.
  TaskPtr submit(std::function<void()> run, std::function<void()> on_done);

  /// Runs what is queued and then `run`, on this thread. Rethrows what `run`
  /// throws.
  void run_now(const std::function<void()>& run);

  /// Returns when `task` is done, having run it here if it had not begun.
  void finish(const TaskPtr& task);

  /// Whether all operations that were submitted are done.
  bool is_idle();

  /// Ends the background thread. Operations that have not begun fail; the one
  /// that is running is waited for: make it return first (Channel::abort).
  void stop();

 private:
  class Turn;

  void work();
  TaskPtr pop();
  static void execute(Task& task);

  Mutex mutex_;
  std::condition_variable filled_; // with mutex_
  std::condition_variable ended_; // a turn; with mutex_
  bool has_turn_ TESSERA_GUARDED_BY(mutex_) = false; // some thread, to run one
  std::deque<TaskPtr> tasks_ TESSERA_GUARDED_BY(mutex_);
  TaskPtr last_ TESSERA_GUARDED_BY(mutex_); // the last that was submitted
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread worker_ TESSERA_GUARDED_BY(mutex_); // started by the first submit
};

} // namespace tessera::comm::shm
