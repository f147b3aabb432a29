#include "comm/store/bounded_store.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace tessera::comm {
namespace {

/// How long to wait for a store that has answered so far.
constexpr Milliseconds kPatience{500};
/// How long to wait, again and again, for a store that is late already.
constexpr Milliseconds kGlance{5};
/// How long to wait for the last calls.
constexpr Milliseconds kLongestCall{2000};
constexpr Milliseconds kOneAttempt{1000};

/// Runs a function on a thread that nobody waits for.
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

/// Makes calls of a store, one after the other.
class BoundedStore::Thread {
 public:
  explicit Thread(StorePtr store) : shared_(std::make_shared<Shared>()) {
    shared_->store = std::move(store);
    thread_ = std::thread([shared = shared_] { work(*shared); });
  }
  ~Thread() {
    const bool hangs =
        !is_idle(kLongestCall); // the last calls may be on their way
    {
      const MutexLock lock(shared_->mutex);
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
    const MutexLock lock(shared_->mutex);
    shared_->calls.emplace_back([task] { (*task)(); });
    shared_->changed.notify_all();
    return result;
  }

  /// Waits up to `limit` for all calls to come back. Returns whether they did.
  bool is_idle(Milliseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    MutexLock lock(shared_->mutex);
    while (shared_->is_calling || !shared_->calls.empty()) {
      if (lock.wait_until(shared_->changed, end) == std::cv_status::timeout) {
        return !shared_->is_calling && shared_->calls.empty();
      }
    }
    return true;
  }

 private:
  struct Shared {
    StorePtr store;
    Mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> calls TESSERA_GUARDED_BY(mutex);
    bool is_calling TESSERA_GUARDED_BY(mutex) = false;
    bool is_over TESSERA_GUARDED_BY(mutex) = false;
  };

  static void work(Shared& shared) {
    MutexLock lock(shared.mutex);
    for (;;) {
      while (!shared.is_over && shared.calls.empty()) {
        lock.wait(shared.changed);
      }
      if (shared.calls.empty()) {
        return; // calls from before the end are done
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

BoundedStore::BoundedStore(StorePtr store)
    : thread_(std::make_unique<Thread>(std::move(store))) {}

BoundedStore::BoundedStore(StoreEndpoint endpoint, std::string advice)
    : endpoint_(std::move(endpoint)), advice_(std::move(advice)) {}

BoundedStore::~BoundedStore() {
  if (connecting_.valid()) { // not while the process ends
    connecting_.wait_for(kLongestCall);
  }
}

std::optional<std::string> BoundedStore::connect() {
  if (thread_) {
    return std::nullopt;
  }
  if (!connecting_.valid()) {
    connecting_ = start_apart([endpoint = endpoint_, advice = advice_] {
      StorePtr store = connect_store(endpoint, kOneAttempt, advice);
      // A process that is suspended answers later; nobody waits for it here.
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

BoundedStore::Thread& BoundedStore::thread() {
  if (!thread_) {
    throw std::runtime_error(problem_);
  }
  return *thread_;
}

template <class Function>
void BoundedStore::start_and_wait_a_little(Function function) {
  const Milliseconds limit = thread().is_idle(kGlance) ? kPatience : kGlance;
  auto done = thread().start(std::move(function));
  if (done.wait_for(limit) == std::future_status::ready) {
    done.get();
  }
}

void BoundedStore::set(const std::string& key, const std::string& bytes) {
  start_and_wait_a_little(
      [key, bytes](c10d::Store& store) { store.set(key, bytes); });
}

void BoundedStore::set_unless_set(
    const std::string& key,
    const std::string& bytes) {
  start_and_wait_a_little(
      [key, bytes](c10d::Store& store) { store.compareSet(key, "", bytes); });
}

std::optional<std::string> BoundedStore::get(const std::string& key) {
  if (!thread().is_idle(kGlance)) {
    throw StoreSlow();
  }
  auto value =
      thread().start([key](c10d::Store& store) -> std::optional<std::string> {
        if (!store.check({key})) {
          return std::nullopt;
        }
        return store.get_to_str(key);
      });
  if (value.wait_for(kPatience) != std::future_status::ready) {
    throw StoreSlow();
  }
  return value.get();
}

} // namespace tessera::comm
