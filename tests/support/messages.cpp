#include "support/messages.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

namespace tessera::testing {
namespace {

/// Packets have a limit; a longer text loses its end.
constexpr size_t kMaxField = 40'000;
constexpr size_t kMaxPacket = 160'000;

} // namespace

bool send_message(int fd, const Message& message) {
  std::string packet(1, static_cast<char>(message.kind));
  for (const std::string& field : message.fields) {
    packet += field.substr(0, kMaxField);
    packet += '\0';
  }
  while (send(fd, packet.data(), packet.size(), MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

std::optional<Message> receive_message(int fd) {
  std::string packet(kMaxPacket, '\0');
  ssize_t count = 0;
  while ((count = recv(fd, packet.data(), packet.size(), 0)) < 0) {
    if (errno != EINTR) {
      return std::nullopt;
    }
  }
  if (count == 0) {
    return std::nullopt;
  }
  Message message{static_cast<Message::Kind>(packet[0]), {}};
  std::string field;
  for (ssize_t i = 1; i < count; ++i) {
    if (packet[static_cast<size_t>(i)] == '\0') {
      message.fields.push_back(std::exchange(field, {}));
    } else {
      field += packet[static_cast<size_t>(i)];
    }
  }
  return message;
}

} // namespace tessera::testing
