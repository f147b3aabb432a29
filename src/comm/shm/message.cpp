#include "comm/shm/message.h"

#include <string>
#include <type_traits>

#include "comm/shm/channel.h"

namespace tessera::comm::shm {
namespace {

enum class Part : uint32_t { Call = 0, Answer = 1, Data = 2 };

uint32_t stream_of(const MessageRoute& route, Part part) {
  return static_cast<uint32_t>(route.tag) * 4 + static_cast<uint32_t>(part);
}

static_assert(std::is_trivially_copyable_v<Call>);

void send_call(
    Wire& wire,
    const MessageRoute& route,
    Part part,
    const Call& call) {
  wire.send(
      route.peer,
      stream_of(route, part),
      reinterpret_cast<const std::byte*>(&call),
      sizeof call);
}

Call receive_call(Wire& wire, const MessageRoute& route, Part part) {
  Call call;
  wire.receive(
      route.peer,
      stream_of(route, part),
      reinterpret_cast<std::byte*>(&call),
      sizeof call);
  return call;
}

/// One text, the same on both ranks.
void check_fit(
    const Call& sent,
    int sender,
    const Call& expected,
    int receiver) {
  if (sent.digest == expected.digest && sent.bytes == expected.bytes) {
    return;
  }
  throw ChannelError(
      ChannelError::Kind::Mismatch,
      "the message is not what the receiver expects:\n  rank " +
          std::to_string(sender) + ": " + sent.describe() + "\n  rank " +
          std::to_string(receiver) + ": " + expected.describe() +
          "\n  Both must pass the same dtype, number of elements and label. Nothing was received.");
}

} // namespace

void send_message(
    Wire& wire,
    const Call& call,
    const MessageRoute& route,
    const std::byte* data) {
  send_call(wire, route, Part::Call, call);
  const Call theirs = receive_call(wire, route, Part::Answer);
  check_fit(call, route.own_name, theirs, route.peer_name);
  if (call.bytes != 0) {
    wire.send(route.peer, stream_of(route, Part::Data), data, call.bytes);
  }
}

void receive_message(
    Wire& wire,
    const Call& call,
    const MessageRoute& route,
    std::byte* data) {
  const Call theirs = receive_call(wire, route, Part::Call);
  send_call(wire, route, Part::Answer, call);
  check_fit(theirs, route.peer_name, call, route.own_name);
  if (call.bytes != 0) {
    wire.receive(route.peer, stream_of(route, Part::Data), data, call.bytes);
  }
}

} // namespace tessera::comm::shm
