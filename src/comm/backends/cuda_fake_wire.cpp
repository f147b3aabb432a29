#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/cuda/Sleep.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "comm/backends/fake_wire.h"

namespace tessera::comm {
namespace {

using Tensors = std::vector<at::Tensor>;

/// A collective that ends when the wire's stream gets there.
class StreamWork : public c10d::Work {
 public:
  StreamWork(FakeTransfer transfer, const c10::cuda::CUDAStream& wire)
      : Work(-1, transfer.type),
        outputs_(std::move(transfer.outputs)),
        inputs_(std::move(transfer.inputs)),
        wire_(wire) {
    end_.record(wire_);
  }
  ~StreamWork() override {
    if (!is_waited_for_) { // nobody's stream waits before memory is used again
      keep_until_done(outputs_);
      keep_until_done(inputs_);
    }
  }

  bool isCompleted() override {
    return end_.query();
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    end_.block(c10::cuda::getCurrentCUDAStream(wire_.device_index()));
    if (!is_waited_for_.exchange(true)) {
      future_->markCompleted(c10::IValue(outputs_));
    }
    return true;
  }
  Tensors result() override {
    return outputs_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  void keep_until_done(const Tensors& tensors) const {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.is_cuda()) {
        c10::cuda::CUDACachingAllocator::recordStream(
            tensor.storage().data_ptr(), wire_);
      }
    }
  }

  const Tensors outputs_;
  const Tensors inputs_;
  const c10::cuda::CUDAStream wire_;
  c10::Event end_{c10::kCUDA};
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()));
  std::atomic<bool> is_waited_for_{false};
};

/// Of one GPU.
struct Lane {
  c10::cuda::CUDAStream wire; // sleeps
  c10::cuda::CUDAStream copies; // beside it
  double cycles_per_second; // of a sleep
};

void wait(
    const c10::cuda::CUDAStream& waiting,
    const c10::cuda::CUDAStream& for_stream) {
  c10::Event event(c10::kCUDA);
  event.record(for_stream);
  event.block(waiting);
}

class CudaWire : public FakeWire {
 public:
  explicit CudaWire(const WireSpeed& speed) : speed_(speed) {}

  WorkPtr carry(FakeTransfer transfer) override {
    const c10::cuda::CUDAStream caller =
        c10::cuda::getCurrentCUDAStream(device_of(transfer));
    const Lane& lane = lane_of(caller.device_index());
    wait(lane.wire, caller);
    if (transfer.move) {
      wait(lane.copies, caller);
      const c10::StreamGuard on_copies(lane.copies);
      transfer.move();
    }
    {
      const c10::StreamGuard on_wire(lane.wire);
      const double takes =
          std::min(speed_.seconds(transfer.sent_bytes), kLongestTransfer);
      at::cuda::sleep(static_cast<int64_t>(takes * lane.cycles_per_second));
    }
    if (transfer.move) {
      wait(lane.wire, lane.copies);
    }
    return c10::make_intrusive<StreamWork>(std::move(transfer), lane.wire);
  }

 private:
  /// The current device for a transfer without tensors.
  static c10::DeviceIndex device_of(const FakeTransfer& transfer) {
    for (const Tensors* tensors : {&transfer.outputs, &transfer.inputs}) {
      if (!tensors->empty()) {
        return tensors->front().device().index();
      }
    }
    return -1;
  }

  const Lane& lane_of(c10::DeviceIndex device) {
    const std::scoped_lock lock(mutex_);
    auto lane = lanes_.find(device);
    if (lane == lanes_.end()) {
      const auto new_stream = [&] {
        return c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device);
      };
      const auto wire = new_stream();
      lane =
          lanes_.emplace(device, Lane{wire, new_stream(), speed_of_clock(wire)})
              .first;
    }
    return lane->second;
  }

  /// How many cycles of a sleep are a second: the second of two sleeps, when
  /// the clock has come up.
  static double speed_of_clock(const c10::cuda::CUDAStream& stream) {
    constexpr int64_t kCycles = 20'000'000;
    const c10::StreamGuard guard(stream);
    const c10::EventFlag timed = c10::EventFlag::BACKEND_DEFAULT;
    c10::Event begin(c10::kCUDA, timed);
    c10::Event end(c10::kCUDA, timed);
    at::cuda::sleep(kCycles);
    begin.record(stream);
    at::cuda::sleep(kCycles);
    end.record(stream);
    end.synchronize();
    return static_cast<double>(kCycles) / (begin.elapsedTime(end) / 1e3);
  }

  const WireSpeed speed_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, Lane> lanes_;
};

} // namespace

std::unique_ptr<FakeWire> make_cuda_wire(const WireSpeed& speed) {
  return std::make_unique<CudaWire>(speed);
}

} // namespace tessera::comm
