#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <utility>

#include "base/mutex.h"
#include "comm/backends/fake_wire.h"
#include "libtorch/cuda_kernel.h"

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
    is_waited_for_ = true;
    return true;
  }
  Tensors result() override {
    return outputs_;
  }
  /// Completed at once, as NCCL's: who waits for it makes a stream wait.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::call_once(future_is_completed_, [this] {
      const c10::StreamGuard on_wire(wire_);
      future_->markCompleted(c10::IValue(outputs_));
    });
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
          c10::ListType::create(c10::TensorType::get()),
          std::vector<c10::Device>{wire_.device()});
  std::once_flag future_is_completed_;
  std::atomic<bool> is_waited_for_{false};
};

/// The streams of one GPU.
struct Lane {
  c10::cuda::CUDAStream wire; // sleeps
  c10::cuda::CUDAStream copies; // beside it
};

/// One thread that waits. It counts nanoseconds of the GPU's own timer, not
/// cycles of a multiprocessor, whose clock is lower while matrices are
/// multiplied: there the wire would be slower where that matters.
constexpr const char* kSleep = R"(
extern "C" __global__ void fake_wire(unsigned long long nanoseconds) {
  unsigned long long begin;
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}
)";

struct SleepKernels {
  Mutex mutex;
  std::map<c10::DeviceIndex, std::unique_ptr<libtorch::CudaKernel>> by_device
      TESSERA_GUARDED_BY(mutex);
};
SleepKernels& sleep_kernels() {
  static auto& instance = *new SleepKernels; // kernels are never unloaded
  return instance;
}

/// On the current stream of the current device.
void sleep(c10::DeviceIndex device, double seconds) {
  SleepKernels& kernels = sleep_kernels();
  const MutexLock lock(kernels.mutex);
  auto& kernel = kernels.by_device[device];
  if (kernel == nullptr) {
    kernel = std::make_unique<libtorch::CudaKernel>(
        c10::Device(c10::kCUDA, device),
        libtorch::KernelSource{
            .call = "collective", .function = "fake_wire", .text = kSleep});
  }
  auto nanoseconds = static_cast<unsigned long long>(seconds * 1e9);
  std::array<void*, 1> arguments{&nanoseconds};
  kernel->launch(/*blocks=*/1, /*threads=*/1, arguments);
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
      sleep(
          caller.device_index(),
          std::min(speed_.seconds(transfer.sent_bytes), kLongestTransfer));
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
    const MutexLock lock(mutex_);
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
  Mutex mutex_;
  std::map<c10::DeviceIndex, Lane> lanes_ TESSERA_GUARDED_BY(mutex_);
};

} // namespace

std::unique_ptr<FakeWire> make_cuda_wire(const WireSpeed& speed) {
  return std::make_unique<CudaWire>(speed);
}

} // namespace tessera::comm
