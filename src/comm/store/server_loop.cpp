#include "comm/store/server_loop.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <system_error>

namespace tessera::comm {
namespace {

// What epoll reports of, beside clients.
constexpr ClientId kListener = 0;
constexpr ClientId kStop = 1;
constexpr ClientId kFirstClient = 2;

/// How long to wait before accepting again, after descriptors ran out.
constexpr int kPauseMs = 100;

/// A fraction of the descriptors that this process may have.
size_t strangers_allowed(size_t most) {
  rlimit descriptors{};
  if (getrlimit(RLIMIT_NOFILE, &descriptors) != 0) {
    return most;
  }
  return std::clamp<size_t>(descriptors.rlim_cur / 4, 1, most);
}

} // namespace

ServerLoop::ServerLoop(
    UniqueFd listener,
    int stop,
    std::string secret,
    const StoreLimits& limits)
    : listener_(std::move(listener)),
      secret_(std::move(secret)),
      limits_(limits),
      max_strangers_(strangers_allowed(limits.strangers)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      next_(kFirstClient),
      contents_(
          limits.stored_bytes,
          [this](ClientId client, const wire::Message& message) {
            send(client, message.bytes());
          }) {
  fcntl(listener_.get(), F_SETFL, O_NONBLOCK);
  if (!epoll_ || !watch(listener_.get(), kListener) || !watch(stop, kStop)) {
    throw std::system_error(errno, std::generic_category());
  }
}

void ServerLoop::run() {
  std::vector<epoll_event> events(256);
  for (;;) {
    const int count = epoll_wait(
        epoll_.get(),
        events.data(),
        static_cast<int>(events.size()),
        is_accepting_ ? -1 : kPauseMs);
    if (!is_accepting_) {
      is_accepting_ = watch(listener_.get(), kListener);
    }
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kStop) {
        return;
      }
      if (event.data.u64 == kListener) {
        accept_clients();
      } else {
        serve(event.data.u64, event.events);
      }
    }
    for (const ClientId client : std::exchange(lost_, {})) {
      clients_.erase(client);
    }
  }
}

bool ServerLoop::watch(int fd, ClientId id) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = id}};
  return epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
}

void ServerLoop::accept_clients() {
  for (;;) {
    UniqueFd socket(accept4(
        listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == ECONNABORTED || errno == EINTR) {
        continue;
      }
      if (errno != EAGAIN && errno != EWOULDBLOCK) { // no descriptor left
        epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
        is_accepting_ = false;
      }
      return;
    }
    // With a secret the client has to prove that it knows the secret.
    if (secret_.empty() && !admission_.admits(socket.get())) {
      continue;
    }
    const ClientId id = next_++;
    if (watch(socket.get(), id)) {
      clients_.try_emplace(id, std::move(socket));
      strangers_.insert(id);
      show_strangers_out();
    }
  }
}

/// Where there are too many, closes those that have waited longest and said
/// nothing.
void ServerLoop::show_strangers_out() {
  while (strangers_.size() > max_strangers_) {
    const ClientId id = *strangers_.begin();
    Client& client = clients_.at(id);
    receive(id, client); // the client may have greeted just now
    if (!client.greeting.is_complete()) {
      lose(id, client);
      clients_.erase(id); // the descriptor is needed now
    }
  }
}

void ServerLoop::lose(ClientId id, Client& client) {
  if (!client.is_lost) {
    client.is_lost = true;
    buffered_ -= std::exchange(client.counted, 0);
    strangers_.erase(id);
    contents_.forget(id);
    lost_.push_back(id);
  }
}

void ServerLoop::serve(ClientId id, uint32_t events) {
  const auto found = clients_.find(id);
  if (found == clients_.end() || found->second.is_lost) {
    return;
  }
  Client& client = found->second;
  if ((events & EPOLLOUT) != 0) {
    flush(id, client);
    count_bytes_of(client);
  }
  if ((events & ~EPOLLOUT) != 0 && !client.is_lost) {
    receive(id, client);
  }
}

void ServerLoop::receive(ClientId id, Client& client) {
  try {
    switch (client.connection.receive()) {
      case Connection::Received::kNothing:
        return;
      case Connection::Received::kEnd:
        lose(id, client);
        return;
      case Connection::Received::kBytes:
        break;
    }
    if (client.connection.received().size() >= client.needed) {
      handle_requests(id, client);
    }
  } catch (const StoreFull&) {
    if (!std::exchange(has_told_of_full_, true)) {
      TORCH_WARN(
          "[store] it is full (",
          limits_.stored_bytes >> 20,
          " MiB): clients that want to add to it are cut off. It is for meeting: send data with a collective.");
    }
    lose(id, client);
  } catch (const std::exception&) { // nonsense, or more than memory holds
    lose(id, client);
  }
  count_bytes_of(client);
}

void ServerLoop::handle_requests(ClientId id, Client& client) {
  const std::string& received = client.connection.received();
  std::string_view rest = received;
  while (!client.is_lost && is_greeted(id, client, rest)) {
    const auto request = wire::take_request(rest, client.needed);
    if (!request) {
      break;
    }
    require_magic(*request);
    contents_.handle(id, *request);
  }
  client.connection.take(received.size() - rest.size());
}

/// Takes the greeting from `rest`, if it is still to come.
bool ServerLoop::is_greeted(
    ClientId id,
    Client& client,
    std::string_view& rest) {
  if (client.greeting.is_complete()) {
    return true;
  }
  const auto reply = [&](std::string_view bytes) { send(id, bytes); };
  if (!client.greeting.take(secret_, rest, client.needed, reply)) {
    return false;
  }
  strangers_.erase(id);
  return true;
}

void ServerLoop::send(ClientId id, std::string_view bytes) {
  Client& client = clients_.at(id);
  if (client.is_lost) {
    return;
  }
  const bool is_first = !client.connection.has_unsent();
  client.connection.add(bytes);
  if (client.connection.unsent_bytes() > wire::kMaxUnsentBytes) {
    client.connection.drop_unsent();
    lose(id, client);
  } else if (is_first) {
    flush(id, client);
  }
  count_bytes_of(client);
}

void ServerLoop::flush(ClientId id, Client& client) {
  if (!client.connection.flush()) {
    lose(id, client);
    return;
  }
  const uint32_t wanted =
      client.connection.has_unsent() ? EPOLLIN | EPOLLOUT : EPOLLIN;
  if (std::exchange(client.watched, wanted) != wanted) {
    epoll_event event{.events = wanted, .data = {.u64 = id}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, client.connection.fd(), &event);
  }
}

/// Keeps the buffers of all clients together within their limit.
void ServerLoop::count_bytes_of(Client& client) {
  const size_t now = client.is_lost ? 0 : client.connection.buffered_bytes();
  buffered_ += now - std::exchange(client.counted, now);
  while (buffered_ > limits_.buffered_bytes) {
    const auto largest = std::max_element(
        clients_.begin(), clients_.end(), [](const auto& a, const auto& b) {
          return a.second.counted < b.second.counted;
        });
    largest->second.connection.drop_unsent();
    lose(largest->first, largest->second);
  }
}

} // namespace tessera::comm
