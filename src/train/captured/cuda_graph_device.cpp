// Steps as CUDA graphs.
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "train/captured/step_graph.h"

namespace tessera::train {
namespace {

at::Generator generator_of(const at::Device& device) {
  return at::globalContext().defaultGenerator(device);
}

/// A recording that broke off leaves the generator recorded for ever: another
/// one takes its place, which graphs made before do not advance. Counts how
/// often that happened in this process.
std::atomic<uint64_t>& broken_recordings() {
  static std::atomic<uint64_t> count{0};
  return count;
}

/// For what an exception that is under way says more about.
template <class Fn>
void attempt(const Fn& fn) noexcept {
  try {
    fn();
  } catch (const std::exception&) {
    return;
  }
}

/// The memory that graphs draw on. An allocator asks that a pool in use is used
/// by a graph that lives, so a pool ends with its last graph.
using Pool = std::shared_ptr<const c10::MempoolId_t>;

class NoWarnings : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

class CudaStepGraph : public StepGraph {
 public:
  CudaStepGraph(at::Device device, Pool pool)
      : device_(device), pool_(std::move(pool)) {}

  at::Device device() const override {
    return device_;
  }

  uint64_t random_position() const override {
    at::Generator generator = generator_of(device_);
    const std::scoped_lock lock(generator.mutex());
    return at::check_generator<at::CUDAGeneratorImpl>(generator)
        ->philox_cuda_state(0)
        .offset_intragraph_;
  }

  void begin() override {
    {
      at::Generator generator = generator_of(device_);
      const std::scoped_lock lock(generator.mutex());
      generator_before_ = generator.clone();
    }
    // Memory of eager steps that is free again cannot be used by the recording,
    // which has a pool of its own: the device gets it back.
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph_ = std::make_unique<at::cuda::CUDAGraph>();
    has_begun_ = true; // also if it fails on the way
    // Backward runs on threads of autograd, which other streams' work of this
    // program may use meanwhile: only what this thread does is looked at.
    graph_->capture_begin(*pool_, cudaStreamCaptureModeThreadLocal);
  }

  void end() override {
    graph_->capture_end();
    has_begun_ = false;
    generator_before_ = {};
  }

  void abandon() noexcept override {
    if (std::exchange(has_begun_, false)) {
      try {
        NoWarnings silent; // that the graph is empty
        const c10::WarningUtils::WarningHandlerGuard guard(&silent);
        graph_->capture_end();
      } catch (...) {
        // An operator that must not be recorded has ended the recording.
        clean_up();
      }
    }
    graph_.reset();
    generator_before_ = {};
  }

  void replay() override {
    graph_->replay();
  }

 private:
  /// capture_end() stops at its first step then, and leaves the others to us;
  /// those that this LibTorch has done already throw.
  void clean_up() noexcept {
    namespace allocator = c10::cuda::CUDACachingAllocator;
    auto* host = at::getHostAllocator(at::kCUDA);
    attempt([&] { allocator::endAllocateToPool(device_.index(), *pool_); });
    attempt([&] { host->end_allocate_to_pool(*pool_); });
    if (!owns_pool()) {
      attempt([&] { allocator::releasePool(device_.index(), *pool_); });
      attempt([&] { host->release_pool(*pool_); });
    }
    // The generator believes that it is still recorded: it gets the state that
    // it had before. (LibTorch 2.13 keeps what is recorded by the capture, so
    // that may not be needed there; its headers do not say.)
    at::Generator generator = generator_of(device_);
    const std::scoped_lock lock(generator.mutex());
    generator.graphsafe_set_state(generator_before_);
    ++broken_recordings();
  }

  /// Whether capture_end() got so far that the graph releases the pool when it
  /// goes, though it has failed since.
  bool owns_pool() const noexcept {
    try {
      graph_->pool();
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  const at::Device device_;
  const Pool pool_;
  std::unique_ptr<at::cuda::CUDAGraph> graph_;
  bool has_begun_ = false; // and not ended
  at::Generator generator_before_;
};

class CudaGraphDevice : public GraphDevice {
 public:
  explicit CudaGraphDevice(at::Device device)
      : device_(device),
        stream_(c10::cuda::getStreamFromPool(
            /*isHighPriority=*/false,
            device.index())) {
    // What set-up has left: parameters from before they were sharded.
    c10::cuda::CUDACachingAllocator::emptyCache();
  }

  at::Device device() const override {
    return device_;
  }

  uint64_t epoch() const override {
    return broken_recordings();
  }

  /// All graphs share a pool: one is replayed at a time. Its inputs lie
  /// outside, and its output is copied. Gradients that a step leaves lie in the
  /// pool: they are valid until another graph is replayed, and that one begins
  /// with other gradients, or without any.
  std::unique_ptr<StepGraph> make_graph() override {
    Pool pool = pool_.lock();
    if (pool == nullptr) {
      pool = std::make_shared<const c10::MempoolId_t>(
          at::cuda::graph_pool_handle());
      pool_ = pool;
    }
    return std::make_unique<CudaStepGraph>(device_, std::move(pool));
  }

  void on_recording_stream(const std::function<void()>& work) override {
    const c10::Stream caller = c10::cuda::getCurrentCUDAStream(device_.index());
    wait(/*waiting=*/stream_, /*for_stream=*/caller);
    try {
      const c10::StreamGuard guard(stream_);
      work();
    } catch (...) {
      attempt([&] { wait(caller, stream_); }); // what is queued may still write
      throw;
    }
    wait(caller, stream_);
  }

 private:
  static void wait(const c10::Stream& waiting, const c10::Stream& for_stream) {
    c10::Event event(c10::kCUDA);
    event.record(for_stream);
    event.block(waiting);
  }

  const at::Device device_;
  const c10::Stream stream_;
  std::weak_ptr<const c10::MempoolId_t> pool_;
};

} // namespace

std::unique_ptr<GraphDevice> make_cuda_graph_device(c10::Device device) {
  return std::make_unique<CudaGraphDevice>(device);
}

} // namespace tessera::train
