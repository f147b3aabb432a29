// Bytes to and from a store, until a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "comm/store/store.h"
#include "comm/store/wire.h"

namespace tessera::comm {

using Deadline = std::chrono::steady_clock::time_point;

/// c10d::Store::kNoTimeout means never.
Deadline after(Milliseconds timeout);

/// 0 once `events` happened, ETIMEDOUT at the deadline.
int wait_for(int fd, short events, Deadline deadline);

/// The text says what the store did, as in "it closed the connection".
struct StreamClosed : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct StreamSilent : std::exception {};

/// Sends and receives on a socket that does not block. Throws StreamClosed, or
/// StreamSilent at the deadline.
class StoreStream {
 public:
  StoreStream(int fd, Deadline deadline) : fd_(fd), deadline_(deadline) {}

  void set_deadline(Deadline deadline) {
    deadline_ = deadline;
  }

  /// Throws DistStoreError, with nothing sent, if no store would take
  /// `message`.
  void send(const wire::Message& message);

  void send_bytes(std::string_view rest);

  template <class T>
  T number() {
    T value{};
    receive(&value, sizeof value);
    return value;
  }

  template <class Array>
  Array array() {
    Array result;
    receive(result.data(), result.size());
    return result;
  }

  std::vector<uint8_t> bytes();

 private:
  void receive(void* into, size_t size);

  /// After a call that failed with errno.
  void wait_or_throw(short events);

  const int fd_;
  Deadline deadline_;
};

} // namespace tessera::comm
