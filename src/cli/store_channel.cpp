#include "cli/store_channel.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

namespace tessera::cli {
namespace {

using comm::Milliseconds;
using comm::StorePtr;

/// For an answer of a store that answered so far.
constexpr Milliseconds kPatience{500};
/// For one that is late already, again and again.
constexpr Milliseconds kGlance{5};
/// For the last words.
constexpr Milliseconds kLongest{2000};
constexpr Milliseconds kOneAttempt{1000};
constexpr const char* kAdvice =
    "Is the launcher of node 0 running there, and is --rdzv-endpoint the same everywhere?";

/// Runs on a thread that nobody waits for.
template <class Function>
auto start_apart(Function function) {
  using Result = decltype(function());
  auto task =
      std::make_shared<std::packaged_task<Result()>>(std::move(function));
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  return result;
}

bool is_ready(const std::future<StorePtr>& future, Milliseconds limit) {
  return future.wait_for(limit) == std::future_status::ready;
}

} // namespace

/// Makes calls of a store one after the other.
class StoreChannel::Thread {
 public:
  explicit Thread(StorePtr store) : shared_(std::make_shared<Shared>()) {
    shared_->store = std::move(store);
    thread_ = std::thread([shared = shared_] { work(*shared); });
  }
  ~Thread() {
    const bool hangs =
        !is_idle(kLongest); // the last words are still to be said
    {
      const std::scoped_lock lock(shared_->mutex);
      shared_->is_over = true;
      shared_->changed.notify_all();
    }
    if (hangs) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  template <class Function>
  auto start(Function function) {
    using Result = decltype(function(*shared_->store));
    auto task = std::make_shared<std::packaged_task<Result()>>(
        [store = shared_->store, function = std::move(function)] {
          return function(*store);
        });
    auto result = task->get_future();
    const std::scoped_lock lock(shared_->mutex);
    shared_->calls.emplace_back([task] { (*task)(); });
    shared_->changed.notify_all();
    return result;
  }

  /// Whether all calls came back, waiting for that up to `limit`.
  bool is_idle(Milliseconds limit) {
    std::unique_lock lock(shared_->mutex);
    return shared_->changed.wait_for(lock, limit, [&] {
      return shared_->calls.empty() && !shared_->is_calling;
    });
  }

 private:
  struct Shared {
    StorePtr store;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> calls; // guarded by mutex
    bool is_calling = false; // guarded by mutex
    bool is_over = false; // guarded by mutex
  };

  static void work(Shared& shared) {
    std::unique_lock lock(shared.mutex);
    for (;;) {
      shared.changed.wait(
          lock, [&] { return shared.is_over || !shared.calls.empty(); });
      if (shared.calls.empty()) {
        return; // what was asked for before the end is done
      }
      const auto call = std::move(shared.calls.front());
      shared.calls.pop_front();
      shared.is_calling = true;
      lock.unlock();
      call();
      lock.lock();
      shared.is_calling = false;
      shared.changed.notify_all();
    }
  }

  const std::shared_ptr<Shared> shared_; // the thread may outlive the object
  std::thread thread_;
};

StoreChannel::StoreChannel(StorePtr store)
    : thread_(std::make_unique<Thread>(std::move(store))) {}

StoreChannel::StoreChannel(comm::StoreEndpoint endpoint)
    : endpoint_(std::move(endpoint)) {}

StoreChannel::~StoreChannel() {
  if (connecting_.valid()) { // not in the middle of the process's end
    connecting_.wait_for(kLongest);
  }
}

std::optional<std::string> StoreChannel::connect() {
  if (thread_) {
    return std::nullopt;
  }
  if (!connecting_.valid()) {
    connecting_ = start_apart([endpoint = endpoint_] {
      StorePtr store = connect_store(endpoint, kOneAttempt, kAdvice);
      // A launcher that is suspended answers later; nobody waits for it here.
      store->setTimeout(c10d::Store::kNoTimeout);
      return store;
    });
  }
  if (is_ready(connecting_, kGlance)) {
    try {
      thread_ = std::make_unique<Thread>(connecting_.get());
      return std::nullopt;
    } catch (const std::exception& error) {
      const std::string text = error.what();
      problem_ = text.substr(0, text.find('\n'));
    }
  }
  return problem_;
}

StoreChannel::Thread& StoreChannel::thread() {
  if (!thread_) {
    throw std::runtime_error(problem_); // where there is nobody to tell
  }
  return *thread_;
}

template <class Function>
void StoreChannel::start_and_wait_a_little(Function function) {
  const Milliseconds limit = thread().is_idle(kGlance) ? kPatience : kGlance;
  auto done = thread().start(std::move(function));
  if (done.wait_for(limit) == std::future_status::ready) {
    done.get();
  }
}

void StoreChannel::set(const std::string& key, const std::string& bytes) {
  start_and_wait_a_little(
      [key, bytes](c10d::Store& store) { store.set(key, bytes); });
}

void StoreChannel::set_unless_set(
    const std::string& key,
    const std::string& bytes) {
  start_and_wait_a_little(
      [key, bytes](c10d::Store& store) { store.compareSet(key, "", bytes); });
}

std::optional<std::string> StoreChannel::get(const std::string& key) {
  if (!thread().is_idle(kGlance)) {
    throw launch::ChannelSlow();
  }
  auto value =
      thread().start([key](c10d::Store& store) -> std::optional<std::string> {
        if (!store.check({key})) {
          return std::nullopt;
        }
        return store.get_to_str(key);
      });
  if (value.wait_for(kPatience) != std::future_status::ready) {
    throw launch::ChannelSlow();
  }
  return value.get();
}

} // namespace tessera::cli
