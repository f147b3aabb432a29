// Accepts the clients of a store and serves them.
#pragma once

#include <sys/epoll.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "comm/store/admission.h"
#include "comm/store/connection.h"
#include "comm/store/contents.h"
#include "comm/store/greeting.h"
#include "comm/store/server.h"

namespace tessera::comm {

/// Everything that the thread of a StoreServer owns.
///
/// A client that fails, sends nonsense or holds too much is *lost*: the loop no
/// longer reads from the client or sends to it. The client is removed after all
/// events at hand were served, since a reply that loses a client may be in the
/// middle of another client's request.
class ServerLoop {
 public:
  /// `stop` becomes readable when run() shall return. Throws
  /// std::system_error.
  ServerLoop(
      UniqueFd listener,
      int stop,
      std::string secret,
      const StoreLimits& limits);

  void run();

 private:
  struct Client {
    explicit Client(UniqueFd socket) : connection(std::move(socket)) {}

    Connection connection;
    Greeting greeting;
    size_t needed = 1; // bytes received before they are parsed again
    uint32_t watched = EPOLLIN;
    bool is_lost = false;
    size_t counted = 0; // bytes of this client in buffered_
  };

  bool watch(int fd, ClientId id);

  // Clients come and go.
  void accept_clients();
  void show_strangers_out();
  void lose(ClientId id, Client& client);

  // What they send.
  void serve(ClientId id, uint32_t events);
  void receive(ClientId id, Client& client);
  void handle_requests(ClientId id, Client& client);
  bool is_greeted(ClientId id, Client& client, std::string_view& rest);

  // What they are sent.
  void send(ClientId id, std::string_view bytes);
  void flush(ClientId id, Client& client);

  void count_bytes_of(Client& client);

  const UniqueFd listener_;
  const std::string secret_;
  const StoreLimits limits_;
  const size_t max_strangers_;
  const UniqueFd epoll_;
  bool is_accepting_ = true;
  bool has_told_of_full_ = false;
  Admission admission_;
  ClientId next_;
  std::unordered_map<ClientId, Client> clients_;
  std::set<ClientId> strangers_; // have not greeted; oldest first
  size_t buffered_ = 0; // bytes in the buffers of all clients
  std::vector<ClientId> lost_;
  StoreContents contents_;
};

} // namespace tessera::comm
