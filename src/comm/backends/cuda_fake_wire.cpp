#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/cuda/Sleep.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <utility>

#include "comm/backends/fake_wire.h"
#include "libtorch/recording.h"

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

/// The streams of one GPU.
struct Lane {
  c10::cuda::CUDAStream wire; // sleeps
  c10::cuda::CUDAStream copies; // beside it
};

/// A sleep counts cycles of the GPU's clock, which comes up when there is work:
/// sleeps are timed until two after each other take as long.
double measure_cycles_per_second(c10::DeviceIndex device) {
  constexpr int64_t kCycles = 10'000'000;
  constexpr int kMostSleeps = 50;
  constexpr double kTolerance = 0.005;
  const auto stream =
      c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device);
  const c10::StreamGuard guard(stream);
  const c10::EventFlag timed = c10::EventFlag::BACKEND_DEFAULT;
  double rate = 0;
  for (int i = 0; i < kMostSleeps; ++i) {
    c10::Event begin(c10::kCUDA, timed);
    c10::Event end(c10::kCUDA, timed);
    begin.record(stream);
    at::cuda::sleep(kCycles);
    end.record(stream);
    end.synchronize();
    const double before = std::exchange(
        rate, static_cast<double>(kCycles) / (begin.elapsedTime(end) / 1e3));
    if (std::abs(rate - before) < kTolerance * rate) {
      break;
    }
  }
  return rate;
}

/// Measured once per process: not while a step is captured, which may not wait.
double cycles_per_second(c10::DeviceIndex device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, double> measured;
  const std::scoped_lock lock(mutex);
  auto found = measured.find(device);
  if (found == measured.end()) {
    engine::refuse_in_recording(
        "collective",
        "The fake wire measures the GPU's clock at its first collective: run an eager step first.");
    found = measured.emplace(device, measure_cycles_per_second(device)).first;
  }
  return found->second;
}

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
      at::cuda::sleep(static_cast<int64_t>(
          takes * cycles_per_second(caller.device_index())));
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
      lane = lanes_.emplace(device, Lane{new_stream(), new_stream()}).first;
    }
    return lane->second;
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
