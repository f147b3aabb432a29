// The keys and values of a store, and which client waits for which key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "comm/store/wire.h"

namespace tessera::comm {

/// A number for a client, never given twice, unlike descriptors.
using ClientId = uint64_t;

/// A request would make the store hold more than it may.
struct StoreFull : wire::BadRequest {
  using BadRequest::BadRequest;
};

/// Carries out requests. A client has at most one wait at a time; the wait ends
/// when all of its keys are there.
///
/// Thread safety: one thread at a time.
class StoreContents {
 public:
  using Reply = std::function<void(ClientId, const wire::Message&)>;

  /// `reply` is called while a request is carried out, also for clients whose
  /// wait the request ends. It may call forget().
  StoreContents(size_t max_bytes, Reply reply);

  /// Throws BadRequest, with nothing changed.
  void handle(ClientId client, const wire::Request& request);

  /// The client no longer waits for any key.
  void forget(ClientId client);

 private:
  // What is there.
  std::string_view value_of(const std::string& key) const;
  int64_t length_of_queue(const std::string& key) const;
  bool is_there(const std::string& key) const;

  // Room. It is counted as if no value were replaced.
  void require_room(size_t bytes) const;
  void require_room(const wire::Request& request) const;

  // Changes. put(), erase(), count(), push() and pop() wake nobody.
  void put(const std::string& key, std::string value);
  int64_t erase(const std::string& key);
  void set(const std::string& key, std::string value);
  void append(const std::string& key, std::string_view more);
  std::string compare_set(
      const std::string& key,
      std::string_view expected,
      std::string_view desired);
  int64_t count(const std::string& key, int64_t amount);
  void push(const std::string& key, std::string_view value);
  wire::Message pop(const std::string& key);

  // Waits.
  void wait(ClientId client, const std::vector<std::string_view>& keys);
  void come_to_barrier(ClientId client, const std::string& key, int64_t size);
  void await(ClientId client, const std::string& key);
  void end_wait(ClientId client);
  void wake_all(const std::string& key);
  void wake_one(const std::string& key);
  bool count_down(ClientId client);

  const size_t max_bytes_;
  const Reply reply_;
  size_t held_ = 0; // bytes of all that follows, about
  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<std::string, std::deque<std::string>> queues_;
  std::unordered_map<std::string, std::vector<ClientId>> waiting_; // by key
  std::unordered_map<ClientId, size_t> awaited_; // how many keys each waits for
};

} // namespace tessera::comm
