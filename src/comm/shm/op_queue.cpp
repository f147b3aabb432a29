#include "comm/shm/op_queue.h"

#include <stdexcept>
#include <utility>

namespace tessera::comm::shm {

/// The thread that has it may run operations; no other does.
class OpQueue::Turn {
 public:
  /// `queue.has_turn_` was set for this thread.
  explicit Turn(OpQueue& queue) : queue_(queue) {}
  ~Turn() {
    {
      const MutexLock lock(queue_.mutex_);
      queue_.has_turn_ = false;
    }
    queue_.ended_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  OpQueue& queue_;
};

OpQueue::~OpQueue() {
  stop();
}

void OpQueue::stop() {
  std::deque<TaskPtr> dropped;
  std::thread worker;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
    dropped.swap(tasks_);
    worker.swap(worker_);
  }
  filled_.notify_all();
  ended_.notify_all();
  if (worker.joinable()) {
    worker.join();
  }
  for (const TaskPtr& task : dropped) {
    task->run_ = [] {
      throw std::runtime_error(
          "the group was destroyed before this operation began; wait for it first");
    };
    execute(*task);
  }
}

OpQueue::TaskPtr OpQueue::submit(
    std::function<void()> run,
    std::function<void()> on_done) {
  auto task = std::make_shared<Task>();
  task->run_ = std::move(run);
  task->on_done_ = std::move(on_done);
  {
    const MutexLock lock(mutex_);
    tasks_.push_back(task);
    last_ = task;
    if (!worker_.joinable()) {
      worker_ = std::thread([this] { work(); });
    }
  }
  filled_.notify_one();
  return task;
}

bool OpQueue::is_idle() {
  const MutexLock lock(mutex_);
  return !last_ || last_->done();
}

void OpQueue::run_now(const std::function<void()>& run) {
  {
    MutexLock lock(mutex_);
    while (has_turn_) {
      lock.wait(ended_);
    }
    has_turn_ = true;
  }
  const Turn turn(*this);
  while (TaskPtr task = pop()) {
    execute(*task);
  }
  run();
}

void OpQueue::finish(const TaskPtr& task) {
  while (!task->done()) {
    {
      MutexLock lock(mutex_);
      while (has_turn_ && !task->done()) {
        lock.wait(ended_);
      }
      if (task->done()) {
        return;
      }
      has_turn_ = true;
    }
    const Turn turn(*this);
    if (TaskPtr next = pop()) {
      execute(*next);
    }
  }
}

void OpQueue::work() {
  while (true) {
    {
      MutexLock lock(mutex_);
      while (!stopping_ && (tasks_.empty() || has_turn_)) {
        lock.wait(tasks_.empty() ? filled_ : ended_);
      }
      if (stopping_) {
        return;
      }
      has_turn_ = true;
    }
    const Turn turn(*this);
    if (TaskPtr task = pop()) {
      execute(*task);
    }
  }
}

OpQueue::TaskPtr OpQueue::pop() {
  const MutexLock lock(mutex_);
  if (tasks_.empty()) {
    return nullptr;
  }
  TaskPtr task = std::move(tasks_.front());
  tasks_.pop_front();
  return task;
}

void OpQueue::execute(Task& task) {
  try {
    task.run_();
  } catch (...) {
    task.error_ = std::current_exception();
  }
  task.run_ = nullptr;
  task.done_.store(true, std::memory_order_release);
  if (auto on_done = std::exchange(task.on_done_, nullptr)) {
    on_done();
  }
}

} // namespace tessera::comm::shm
