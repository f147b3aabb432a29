// A store whose calls return in bounded time.
#pragma once

#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "comm/store/store.h"

namespace tessera::comm {

/// The store has not answered yet: its host is suspended, perhaps, or far away.
struct StoreSlow : std::runtime_error {
  StoreSlow() : std::runtime_error("the store does not answer.") {}
};

/// Calls of a store that is frozen or out of reach wait for as long as that
/// lasts. So a thread makes these calls, in their order, while the caller waits
/// a second or two at most; if a call hangs, its thread is left behind.
///
/// Thread safety: for one thread at a time.
class BoundedStore {
 public:
  /// For a store in this process.
  explicit BoundedStore(StorePtr store);
  /// For a store that connect() is to find. `advice` ends the error if there is
  /// none.
  BoundedStore(StoreEndpoint endpoint, std::string advice);
  ~BoundedStore();

  /// Returns nothing once the store is found, else why it is not found. Call
  /// again until then, and before any of the calls below.
  std::optional<std::string> connect();
  /// Sets or replaces a value; if the store is slow, later.
  void set(const std::string& key, const std::string& bytes);
  /// Sets a value unless the key has one, atomically; if the store is slow,
  /// later.
  void set_unless_set(const std::string& key, const std::string& bytes);
  /// The value, or nothing if the key has not been set. Throws StoreSlow if the
  /// store may answer later.
  std::optional<std::string> get(const std::string& key);

 private:
  class Thread;
  Thread& thread();
  template <class Function>
  void start_and_wait_a_little(Function function);

  const StoreEndpoint endpoint_;
  const std::string advice_;
  std::future<StorePtr> connecting_;
  std::string problem_ = "not tried yet"; // of the last attempt to connect
  std::unique_ptr<Thread> thread_; // once connected
};

} // namespace tessera::comm
