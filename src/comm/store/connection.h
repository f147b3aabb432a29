// The socket of a store's client, with the bytes that wait on it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace tessera::comm {

/// Sends and receives without blocking. What cannot be sent now waits here.
class Connection {
 public:
  explicit Connection(UniqueFd socket);

  int fd() const {
    return socket_.get();
  }

  enum class Received { kNothing, kBytes, kEnd };
  /// Reads once, to the end of received().
  Received receive();
  const std::string& received() const {
    return received_;
  }
  /// Forgets the first bytes of received().
  void take(size_t count) {
    received_.erase(0, count);
  }

  /// Adds to what waits to be sent.
  void add(std::string_view bytes) {
    unsent_ += bytes;
  }
  /// Sends what the socket takes. False if the connection has ended.
  bool flush();
  size_t unsent_bytes() const {
    return unsent_.size() - sent_;
  }
  bool has_unsent() const {
    return !unsent_.empty();
  }

  /// When the socket is closed, the kernel drops what it has not sent.
  void drop_unsent();

  /// Bytes of memory that wait here, in both directions.
  size_t buffered_bytes() const {
    return received_.size() + unsent_.size();
  }

 private:
  UniqueFd socket_;
  std::string received_; // the beginning of a request
  std::string unsent_;
  size_t sent_ = 0; // bytes of unsent_
};

} // namespace tessera::comm
