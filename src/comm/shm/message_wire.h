// What messages between two ranks are made of.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::comm::shm {

/// Moves bytes between this rank and a peer. Between two ranks there are many
/// streams in each direction, told apart by a number: what is sent on a stream
/// arrives on it in order, whatever happens on the others. The sizes of a send
/// and of the receive that takes it must agree; callers see to that.
///
/// Calls block, for the time of the group's timeout at most, and throw
/// ChannelError, which names the peer. Thread safety: a stream is used by one
/// thread at a time, different ones by different threads.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual void send(
      int to,
      uint32_t stream,
      const std::byte* data,
      size_t bytes) = 0;
  virtual void receive(
      int from,
      uint32_t stream,
      std::byte* data,
      size_t bytes) = 0;
};

} // namespace tessera::comm::shm
