// Saves in the background for as long as it is told, on one rank: many small
// tensors, which the caller, LibTorch's optimizers or other threads write to at
// once, while any of these threads ends or drops the save. Each checkpoint is
// compared with the state at the moment of the call.
//
// usage: async_soak FOLDER SECONDS [late-locks]
//
// late-locks: a reader's lock is granted a millisecond after it was requested,
// and the program ends if the lock was freed meanwhile. LibTorch's own
// copy-on-write takes such a lock right after it has given up its reference.
#include <tessera/checkpoint/checkpoint.h>

#include <torch/torch.h>

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TESSERA_SANITIZED 1
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTensors = 400;

std::atomic<bool> late_locks{false};
/// Locks that threads are about to take.
std::array<std::atomic<void*>, 16> awaited{};

[[maybe_unused]] void check_freed(void* memory) {
  if (memory == nullptr || !late_locks.load(std::memory_order_relaxed)) {
    return;
  }
  for (const std::atomic<void*>& lock : awaited) {
    if (lock.load() == memory) {
      constexpr std::string_view message =
          "async_soak: a lock was freed while a thread was about to take it\n";
      [[maybe_unused]] const auto written =
          ::write(STDERR_FILENO, message.data(), message.size());
      ::_exit(3);
    }
  }
}

} // namespace

extern "C" int pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  using Function = int (*)(pthread_rwlock_t*);
  static const auto real =
      reinterpret_cast<Function>(::dlsym(RTLD_NEXT, "pthread_rwlock_rdlock"));
  if (late_locks.load(std::memory_order_relaxed)) {
    for (std::atomic<void*>& slot : awaited) {
      void* none = nullptr;
      if (slot.compare_exchange_strong(none, lock)) {
        ::usleep(1000);
        slot.store(nullptr);
        break;
      }
    }
  }
  return real(lock);
}

#ifndef TESSERA_SANITIZED // they have their own
void operator delete(void* memory) noexcept {
  check_freed(memory);
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  check_freed(memory);
  std::free(memory);
}
#endif

namespace {

namespace ckpt = tessera::checkpoint;

/// Who writes to the tensors while they are saved.
enum class Writer { Caller, Optimizer, Thread, TwoThreads };
/// Where the save ends.
enum class End { Wait, Poll, DroppedElsewhere };

class Soak {
 public:
  explicit Soak(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
    torch::manual_seed(1);
    for (int i = 0; i < kTensors; ++i) {
      // Some are larger than a block of a file, and are released before the
      // end.
      tensors_.push_back(torch::randn({i % 100 == 99 ? 400000 : 1 + i * 7}));
    }
  }

  /// Empty if the checkpoint has what was saved.
  std::string round(Writer writer, End end) {
    tessera::StateDict state;
    std::vector<at::Tensor> expected;
    for (int i = 0; i < kTensors; ++i) {
      state.set(std::to_string(i), tensors_[i]);
      expected.push_back(tensors_[i].clone());
    }
    std::filesystem::remove_all(folder_ / "c");
    auto saving = ckpt::async_save(
        state, folder_ / "c", ckpt::SaveOptions().files_per_rank(2));
    {
      const std::vector<std::jthread> threads = change(writer);
      finish(std::move(saving), end); // while they write
    }
    return compare(expected);
  }

 private:
  void add(size_t begin, size_t end) {
    const torch::NoGradGuard no_grad;
    for (size_t i = begin; i < end; ++i) {
      tensors_[i].add_(1);
    }
  }

  std::vector<std::jthread> change(Writer writer) {
    std::vector<std::jthread> threads;
    switch (writer) {
      case Writer::Caller:
        add(0, tensors_.size());
        break;
      case Writer::Optimizer:
        for (at::Tensor& tensor : tensors_) {
          tensor.mutable_grad() = torch::ones_like(tensor);
        }
        torch::optim::SGD(tensors_, 0.5).step();
        break;
      case Writer::Thread:
        threads.emplace_back([&] { add(0, kTensors); });
        break;
      case Writer::TwoThreads:
        threads.emplace_back([&] { add(0, kTensors / 2); });
        threads.emplace_back([&] { add(kTensors / 2, kTensors); });
        break;
    }
    return threads;
  }

  static void finish(ckpt::AsyncSave saving, End end) {
    switch (end) {
      case End::Wait:
        return saving.wait();
      case End::Poll:
        while (!saving.done()) {
          std::this_thread::yield();
        }
        return;
      case End::DroppedElsewhere:
        std::thread([dropped = std::move(saving)] {}).join();
        return;
    }
  }

  std::string compare(const std::vector<at::Tensor>& expected) const {
    const tessera::StateDict read = ckpt::read(folder_ / "c");
    for (int i = 0; i < kTensors; ++i) {
      if (!torch::equal(read.at(std::to_string(i)).tensor(), expected[i])) {
        return "tensor " + std::to_string(i) + " is not what was saved";
      }
    }
    return "";
  }

  const std::filesystem::path folder_;
  std::vector<at::Tensor> tensors_;
};

} // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: async_soak FOLDER SECONDS [late-locks]\n";
    return 2;
  }
  late_locks = argc > 3 && std::string(argv[3]) == "late-locks";
  Soak soak(argv[1]);
  const auto begin = Clock::now();
  const auto end = begin + std::chrono::seconds(std::atoi(argv[2]));
  int rounds = 0;
  do {
    for (const Writer writer :
         {Writer::Caller,
          Writer::Optimizer,
          Writer::Thread,
          Writer::TwoThreads}) {
      for (const End ending : {End::Wait, End::Poll, End::DroppedElsewhere}) {
        const std::string problem = soak.round(writer, ending);
        if (!problem.empty()) {
          std::cerr << "async_soak: round " << rounds << ": " << problem
                    << '\n';
          return 1;
        }
        ++rounds;
      }
    }
  } while (Clock::now() < end);
  std::cout << "async_soak: " << rounds << " saves, all as they were"
            << std::endl;
  return 0;
}
