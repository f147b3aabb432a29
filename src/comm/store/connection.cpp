#include "comm/store/connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace tessera::comm {

Connection::Connection(UniqueFd socket) : socket_(std::move(socket)) {
  const int on = 1;
  setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

Connection::Received Connection::receive() {
  char bytes[64 * 1024];
  const ssize_t count = recv(fd(), bytes, sizeof bytes, 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
    return Received::kNothing;
  }
  if (count <= 0) {
    return Received::kEnd;
  }
  received_.append(bytes, static_cast<size_t>(count));
  return Received::kBytes;
}

bool Connection::flush() {
  const std::string_view rest = std::string_view(unsent_).substr(sent_);
  const ssize_t count = send(fd(), rest.data(), rest.size(), MSG_NOSIGNAL);
  if (count < 0 && errno != EAGAIN && errno != EINTR) {
    return false;
  }
  sent_ += static_cast<size_t>(std::max<ssize_t>(count, 0));
  if (sent_ > unsent_.size() / 2) { // seldom enough to be cheap
    unsent_.erase(0, std::exchange(sent_, 0));
  }
  return true;
}

void Connection::drop_unsent() {
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

} // namespace tessera::comm
