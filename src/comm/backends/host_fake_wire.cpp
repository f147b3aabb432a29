#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "comm/backends/fake_wire.h"

namespace tessera::comm {
namespace {

using Time = std::chrono::steady_clock::time_point;

/// A collective that ends at its time. Its future is completed by whoever waits
/// for it.
class TimedWork : public c10d::Work {
 public:
  TimedWork(c10d::OpType type, std::vector<at::Tensor> outputs, Time end)
      : Work(-1, type), outputs_(std::move(outputs)), end_(end) {}

  bool isCompleted() override {
    return std::chrono::steady_clock::now() >= end_;
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    std::this_thread::sleep_until(end_);
    if (!is_told_.exchange(true)) {
      future_->markCompleted(c10::IValue(outputs_));
    }
    return true;
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const std::vector<at::Tensor> outputs_;
  const Time end_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()));
  std::atomic<bool> is_told_{false};
};

class HostWire : public FakeWire {
 public:
  explicit HostWire(const WireSpeed& speed) : speed_(speed) {}

  WorkPtr carry(FakeTransfer transfer) override {
    if (transfer.move) {
      transfer.move();
    }
    return c10::make_intrusive<TimedWork>(
        transfer.type,
        std::move(transfer.outputs),
        end_of(transfer.sent_bytes));
  }

 private:
  Time end_of(int64_t sent_bytes) {
    const std::chrono::duration<double> takes(
        std::min(speed_.seconds(sent_bytes), kLongestTransfer));
    const MutexLock lock(mutex_);
    free_at_ = std::max(free_at_, std::chrono::steady_clock::now()) +
        std::chrono::duration_cast<Time::duration>(takes);
    return free_at_;
  }

  const WireSpeed speed_;

  Mutex mutex_;
  Time free_at_ TESSERA_GUARDED_BY(mutex_);
};

} // namespace

std::unique_ptr<FakeWire> make_host_wire(const WireSpeed& speed) {
  return std::make_unique<HostWire>(speed);
}

} // namespace tessera::comm
