// Mutexes whose fields clang checks (scripts/tidy.sh). For g++ they
// are those of the standard library, and the annotations are comments.
#pragma once

#include <condition_variable>
#include <mutex>
#include <shared_mutex>

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

/// Holds a Mutex while it lives, unless unlock() was called.
class TESSERA_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex)
      TESSERA_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~MutexLock() TESSERA_THREAD_ATTRIBUTE(release_capability()) = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() TESSERA_THREAD_ATTRIBUTE(acquire_capability()) {
    lock_.lock();
  }
  void unlock() TESSERA_THREAD_ATTRIBUTE(release_capability()) {
    lock_.unlock();
  }
  /// Waits until `condition` is notified, perhaps for no reason: callers loop.
  void wait(std::condition_variable& condition) {
    condition.wait(lock_);
  }
  /// The same, but no longer than until `end`.
  template <class Time>
  std::cv_status wait_until(
      std::condition_variable& condition,
      const Time& end) {
    return condition.wait_until(lock_, end);
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

/// For an object that calls its own public functions, or is called back.
class TESSERA_THREAD_ATTRIBUTE(capability("mutex")) RecursiveMutex {
 private:
  friend class RecursiveMutexLock;
  std::recursive_mutex mutex_;
};

class TESSERA_THREAD_ATTRIBUTE(scoped_lockable) RecursiveMutexLock {
 public:
  explicit RecursiveMutexLock(RecursiveMutex& mutex)
      TESSERA_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~RecursiveMutexLock()
      TESSERA_THREAD_ATTRIBUTE(release_capability()) = default;
  RecursiveMutexLock(const RecursiveMutexLock&) = delete;
  RecursiveMutexLock& operator=(const RecursiveMutexLock&) = delete;

 private:
  const std::scoped_lock<std::recursive_mutex> lock_;
};

/// For many readers and few writers.
class TESSERA_THREAD_ATTRIBUTE(capability("mutex")) SharedMutex {
 private:
  friend class ReaderLock;
  friend class WriterLock;
  std::shared_mutex mutex_;
};

class TESSERA_THREAD_ATTRIBUTE(scoped_lockable) ReaderLock {
 public:
  explicit ReaderLock(SharedMutex& mutex)
      TESSERA_THREAD_ATTRIBUTE(acquire_shared_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~ReaderLock() TESSERA_THREAD_ATTRIBUTE(release_capability()) = default;
  ReaderLock(const ReaderLock&) = delete;
  ReaderLock& operator=(const ReaderLock&) = delete;

 private:
  const std::shared_lock<std::shared_mutex> lock_;
};

class TESSERA_THREAD_ATTRIBUTE(scoped_lockable) WriterLock {
 public:
  explicit WriterLock(SharedMutex& mutex)
      TESSERA_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : lock_(mutex.mutex_) {}
  ~WriterLock() TESSERA_THREAD_ATTRIBUTE(release_capability()) = default;
  WriterLock(const WriterLock&) = delete;
  WriterLock& operator=(const WriterLock&) = delete;

 private:
  const std::scoped_lock<std::shared_mutex> lock_;
};

} // namespace tessera
