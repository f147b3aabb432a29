// An operation of an OpQueue, as a c10d::Work.
#pragma once

#include <ATen/core/jit_type.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "comm/shm/op_queue.h"

namespace tessera::comm {

/// Waiting for it may run it, see [Note: who runs an operation].
class QueuedWork : public c10d::Work {
 public:
  QueuedWork(
      c10d::OpType type,
      std::vector<at::Tensor> outputs,
      std::shared_ptr<shm::OpQueue> queue)
      : Work(-1, type),
        outputs_(std::move(outputs)),
        queue_(std::move(queue)) {}

  void start(std::function<void()> operation) {
    // The task keeps this work alive until it is done.
    auto self = c10::intrusive_ptr<QueuedWork>::reclaim_copy(this);
    task_ = queue_->submit(
        std::move(operation), [self = std::move(self)] { self->complete(); });
  }

  bool isCompleted() override {
    return task_->done();
  }
  bool isSuccess() const override {
    return task_->done() && !task_->error();
  }
  std::exception_ptr exception() const override {
    return task_->error();
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  bool wait(std::chrono::milliseconds) override {
    queue_->finish(task_);
    if (auto error = task_->error()) {
      std::rethrow_exception(error);
    }
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    MutexLock lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()));
    }
    auto future = future_;
    lock.unlock();
    if (task_->done()) {
      complete();
    }
    return future;
  }

 private:
  void complete() {
    MutexLock lock(mutex_);
    auto future = future_;
    if (!future || std::exchange(future_completed_, true)) {
      return;
    }
    lock.unlock();
    if (auto error = task_->error()) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs_));
    }
  }

  // Constant after start().
  const std::vector<at::Tensor> outputs_;
  const std::shared_ptr<shm::OpQueue> queue_;
  shm::OpQueue::TaskPtr task_;

  Mutex mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_ TESSERA_GUARDED_BY(mutex_);
  bool future_completed_ TESSERA_GUARDED_BY(mutex_) = false;
};

} // namespace tessera::comm
