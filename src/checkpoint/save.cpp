#include <tessera/checkpoint/checkpoint.h>

#include <ATen/core/grad_mode.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "checkpoint/peers.h"
#include "checkpoint/save_job.h"

namespace tessera::checkpoint {

void save(
    const StateDict& state,
    const std::filesystem::path& folder,
    const SaveOptions& options) {
  at::NoGradGuard no_grad;
  const Peers peers(options.group());
  SaveJob job(state, folder, options, peers);
  job.write();
  job.finish(peers);
}

void save(
    Stateful& state,
    const std::filesystem::path& folder,
    const SaveOptions& options) {
  save(state.state_dict(), folder, options);
}

/// A thread that writes, and its outcome.
class AsyncSave::Impl {
 public:
  Impl(std::unique_ptr<SaveJob> job, Peers peers, uint64_t staged_bytes)
      : staged_bytes_(staged_bytes),
        thread_(
            [this, job = std::move(job), peers = std::move(peers)]() mutable {
              run(std::move(job), peers);
            }) {}

  ~Impl() {
    join();
    if (error_) {
      try {
        std::rethrow_exception(error_);
      } catch (const std::exception& error) {
        TORCH_WARN(
            "async_save failed and wait() was not called: ", error.what());
      }
    }
  }

  void wait() {
    join();
    if (error_) {
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
  }

  bool done() const {
    return done_.load(std::memory_order_acquire);
  }
  uint64_t staged_bytes() const {
    return staged_bytes_;
  }

 private:
  void run(std::unique_ptr<SaveJob> job, const Peers& peers) {
    at::NoGradGuard no_grad;
    try {
      job->write();
      job->finish(peers);
    } catch (...) {
      error_ = std::current_exception();
    }
    done_.store(true, std::memory_order_release);
  }

  void join() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  const uint64_t staged_bytes_;
  std::exception_ptr error_; // read after the thread has ended
  std::atomic<bool> done_{false};
  std::thread thread_; // last: it uses the others
};

AsyncSave::AsyncSave() = default;
AsyncSave::AsyncSave(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
AsyncSave::AsyncSave(AsyncSave&&) noexcept = default;
AsyncSave& AsyncSave::operator=(AsyncSave&&) noexcept = default;
AsyncSave::~AsyncSave() = default;

void AsyncSave::wait() {
  if (impl_) {
    impl_->wait();
  }
}

bool AsyncSave::done() const {
  return !impl_ || impl_->done();
}

uint64_t AsyncSave::staged_bytes() const {
  return impl_ ? impl_->staged_bytes() : 0;
}

AsyncSave async_save(
    const StateDict& state,
    const std::filesystem::path& folder,
    const SaveOptions& options) {
  at::NoGradGuard no_grad;
  const Peers peers(options.group());
  auto job = std::make_unique<SaveJob>(state, folder, options, peers);
  uint64_t staged_bytes = 0;
  settle(peers, [&] { staged_bytes = job->detach_from_state(); });
  return AsyncSave(std::make_shared<AsyncSave::Impl>(
      std::move(job), peers.apart("checkpoint"), staged_bytes));
}

AsyncSave async_save(
    Stateful& state,
    const std::filesystem::path& folder,
    const SaveOptions& options) {
  return async_save(state.state_dict(), folder, options);
}

} // namespace tessera::checkpoint
