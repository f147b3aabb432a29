// A mutex whose fields clang can check (-Wthread-safety). For g++ it is a
// std::mutex, and the annotations are comments.
#pragma once

#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define TESSERA_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define TESSERA_THREAD_ATTRIBUTE(x)
#endif

/// The field may be touched only while `mutex` is held.
#define TESSERA_GUARDED_BY(mutex) TESSERA_THREAD_ATTRIBUTE(guarded_by(mutex))
/// Only for a caller that holds `mutex`.
#define TESSERA_REQUIRES(mutex) \
  TESSERA_THREAD_ATTRIBUTE(requires_capability(mutex))

namespace tessera {

class TESSERA_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Holds a Mutex while it lives, unlock() aside.
class TESSERA_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex)
      TESSERA_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~MutexLock() TESSERA_THREAD_ATTRIBUTE(release_capability()) = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() TESSERA_THREAD_ATTRIBUTE(release_capability()) {
    lock_.unlock();
  }
  /// Waits until `condition` is notified, perhaps for no reason: callers loop.
  void wait(std::condition_variable& condition) {
    condition.wait(lock_);
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

} // namespace tessera
