// Streams of bytes between the ranks of a host, in memory that they map.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "base/mutex.h"
#include "comm/shm/channel.h"
#include "comm/shm/message_wire.h"

namespace tessera::comm::shm {

/// [Note: shared-memory pipes]
///
/// The steps of a Channel need all ranks; a message concerns two. Each ordered
/// pair of ranks has a pipe of its own: a ring of bytes with two counters, both
/// modulo 2^32. What travels are packets: stream, size, payload.
///
///   1. `written` is changed by the sender alone and `read` by the receiver
///      alone, under a lock of its process: a ring has one writer and one
///      reader at any time.
///   2. written - read is at most the capacity, a power of two. The bytes
///      between the two belong to the receiver, all others to the sender.
///   3. Both are stored with release and loaded with acquire order: who sees a
///      packet counted sees the packet; who sees room sees that it was read.
///   4. A rank that waits for anything from a peer takes every packet off the
///      pipe; those of other streams it keeps in its own memory, for the
///      threads that will ask. So a packet that nobody asks for blocks none
///      behind it, and a full pipe means that the peer waits for nothing from
///      this rank.
///   5. A thread that finds nothing kept for it remembers `written` as it was
///      when it last emptied the pipe, and sleeps only while `written` still
///      has that value: what another thread keeps for it meanwhile was counted
///      after that.
///
/// A message larger than the pipe passes through it in packets of a quarter,
/// while the peer reads. Memory that was never written to costs nothing.
class Pipes : public Wire {
 public:
  /// Bytes of shared memory that the pipes of `size` ranks need.
  static size_t bytes_needed(int size);

  /// `base` is memory of bytes_needed(), zero-filled before the first rank's
  /// constructor, aligned to a page. It outlives the pipes, as does `channel`,
  /// which knows who is lost and for how long to wait. An error of a pipe gives
  /// the channel up.
  Pipes(std::byte* base, Channel& channel);
  ~Pipes() override;

  void send(int to, uint32_t stream, const std::byte* data, size_t bytes)
      override;
  void receive(int from, uint32_t stream, std::byte* data, size_t bytes)
      override;

 private:
  struct Pipe;
  struct Packet;
  /// Packets that were taken off the pipe from one peer for other streams.
  struct Inbox {
    Mutex mutex; // held by who reads the pipe
    std::map<uint32_t, std::vector<std::byte>> kept TESSERA_GUARDED_BY(mutex);
  };
  struct Outbox {
    Mutex mutex; // held by who writes to the pipe
  };

  using Clock = std::chrono::steady_clock;

  Pipe& pipe(int from, int to) const;
  Clock::time_point end_of_wait() const;
  void write_packet(
      int to,
      uint32_t stream,
      const std::byte* data,
      size_t bytes);
  void wait_for_change(
      FutexWord& word,
      FutexWord& sleepers,
      int peer,
      Clock::time_point end,
      const std::function<bool()>& changed);
  [[noreturn]] void throw_timeout(int peer);

  // Constant after construction.
  std::byte* const base_;
  Channel& channel_;
  const size_t capacity_;

  // By peer. Each has its own lock.
  std::vector<Inbox> inboxes_;
  std::vector<Outbox> outboxes_;
};

} // namespace tessera::comm::shm
