// One message from one rank to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/diagnostics/call.h"
#include "comm/shm/message_wire.h"

namespace tessera::comm::shm {

/// Tags are 0 to this one.
inline constexpr int kLastTag = (1 << 28) - 1;

/// [Note: messages]
///
/// A message is sent only when the receiver has said that the message fits:
///
///   1. The sender sends its Call, on the first stream of the tag.
///   2. The receiver answers with its own, on the second stream. Each side has
///      both calls now, and both throw the same text if they do not fit:
///      nothing else was sent, and both may go on.
///   3. The sender sends the bytes, on the third stream. (The fourth one is the
///      wire's own.)
///
/// Messages of one tag between two ranks follow each other in order. So a send
/// is done when the receiver has called receive_message() and the last bytes
/// are on the wire. Messages in opposite directions, and those of different
/// tags, have different streams and may be under way together.
///
/// Calls fit if digest and bytes are equal. `call.bytes` is the message's size.
struct MessageRoute {
  int peer = 0; // of the group
  int tag = 0;
  int own_name = 0; // how errors call this rank, and the peer
  int peer_name = 0;
};

/// Throws ChannelError: Mismatch, or what the wire throws.
void send_message(
    Wire& wire,
    const Call& call,
    const MessageRoute& route,
    const std::byte* data);
void receive_message(
    Wire& wire,
    const Call& call,
    const MessageRoute& route,
    std::byte* data);

} // namespace tessera::comm::shm
