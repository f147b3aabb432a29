#include "comm/shm/pipes.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace tessera::comm::shm {
namespace {

constexpr size_t kMostCapacity = 256 * 1024;
constexpr size_t kLeastCapacity = 16 * 1024;
/// What all pipes of a group may take, unless that leaves less than the least.
constexpr size_t kBytesOfAll = 16 * 1024 * 1024;
constexpr size_t kPacketAlign = 8;

size_t capacity_for(int num_ranks) {
  const auto ranks = static_cast<size_t>(num_ranks);
  size_t capacity = kMostCapacity;
  while (capacity > kLeastCapacity && capacity * ranks * ranks > kBytesOfAll) {
    capacity /= 2;
  }
  return capacity;
}

size_t padded(size_t bytes) {
  return (bytes + kPacketAlign - 1) / kPacketAlign * kPacketAlign;
}

/// The bytes of a ring from a position on, which may go round its end.
class RingPart {
 public:
  RingPart(std::byte* ring, size_t capacity, uint32_t position)
      : ring_(ring), capacity_(capacity), begin_(position % capacity) {}

  void put(const void* from, size_t bytes) {
    const auto* data = static_cast<const std::byte*>(from);
    const size_t first = std::min(bytes, capacity_ - begin_);
    std::memcpy(ring_ + begin_, data, first);
    std::memcpy(ring_, data + first, bytes - first);
    begin_ = (begin_ + bytes) % capacity_;
  }
  void get(void* to, size_t bytes) {
    auto* data = static_cast<std::byte*>(to);
    const size_t first = std::min(bytes, capacity_ - begin_);
    std::memcpy(data, ring_ + begin_, first);
    std::memcpy(data + first, ring_, bytes - first);
    begin_ = (begin_ + bytes) % capacity_;
  }

 private:
  std::byte* const ring_;
  const size_t capacity_;
  size_t begin_;
};

} // namespace

/// In shared memory, in front of the bytes of the ring.
struct alignas(64) Pipes::Pipe {
  FutexWord written; // bytes ever, by the sender
  FutexWord readers; // threads of the receiver asleep on `written`
  alignas(64) FutexWord read; // bytes ever, by the receiver
  FutexWord writers; // threads of the sender asleep on `read`

  std::byte* ring() {
    return reinterpret_cast<std::byte*>(this + 1);
  }
};

struct Pipes::Packet {
  uint32_t stream = 0;
  uint32_t bytes = 0;

  uint32_t bytes_in_ring() const {
    return static_cast<uint32_t>(sizeof(Packet) + padded(bytes));
  }
};

size_t Pipes::bytes_needed(int size) {
  const auto ranks = static_cast<size_t>(size);
  return ranks * ranks * (sizeof(Pipe) + capacity_for(size));
}

Pipes::Pipes(std::byte* base, Channel& channel)
    : base_(base),
      channel_(channel),
      capacity_(capacity_for(channel.size())),
      inboxes_(static_cast<size_t>(channel.size())),
      outboxes_(static_cast<size_t>(channel.size())) {}

Pipes::~Pipes() = default;

Pipes::Pipe& Pipes::pipe(int from, int to) const {
  const auto size = static_cast<size_t>(channel_.size());
  const size_t index =
      static_cast<size_t>(from) * size + static_cast<size_t>(to);
  return *reinterpret_cast<Pipe*>(base_ + index * (sizeof(Pipe) + capacity_));
}

Pipes::Clock::time_point Pipes::end_of_wait() const {
  return Clock::now() + channel_.patience().timeout;
}

void Pipes::send(int to, uint32_t stream, const std::byte* data, size_t bytes) {
  const size_t most = capacity_ / 4 - sizeof(Packet);
  for (size_t done = 0; done < bytes;) {
    const size_t count = std::min(bytes - done, most);
    write_packet(to, stream, data + done, count);
    done += count;
  }
}

void Pipes::write_packet(
    int to,
    uint32_t stream,
    const std::byte* data,
    size_t bytes) {
  Pipe& out = pipe(channel_.rank(), to);
  const Packet packet{stream, static_cast<uint32_t>(bytes)};
  const MutexLock lock(outboxes_[static_cast<size_t>(to)].mutex);
  const uint32_t written = out.written.load(std::memory_order_relaxed);
  wait_for_change(out.read, out.writers, to, end_of_wait(), [&] {
    const uint32_t used = written - out.read.load(std::memory_order_acquire);
    return used + packet.bytes_in_ring() <= capacity_;
  });
  RingPart part(out.ring(), capacity_, written);
  part.put(&packet, sizeof packet);
  part.put(data, bytes);
  out.written.store(
      written + packet.bytes_in_ring(), std::memory_order_seq_cst);
  wake_sleepers(out.written, out.readers);
}

void Pipes::receive(int from, uint32_t stream, std::byte* data, size_t bytes) {
  Pipe& in = pipe(from, channel_.rank());
  Inbox& inbox = inboxes_[static_cast<size_t>(from)];
  size_t done = 0;
  Clock::time_point end = end_of_wait();
  while (true) {
    const size_t done_before = done;
    MutexLock lock(inbox.mutex);
    if (const auto kept = inbox.kept.find(stream); kept != inbox.kept.end()) {
      // Never more than one message at a time is under way on a stream, but
      // the next one may have begun.
      const size_t count = std::min(kept->second.size(), bytes - done);
      std::memcpy(data + done, kept->second.data(), count);
      kept->second.erase(
          kept->second.begin(),
          kept->second.begin() + static_cast<std::ptrdiff_t>(count));
      done += count;
      if (kept->second.empty()) {
        inbox.kept.erase(kept);
      }
    }
    const uint32_t seen = in.written.load(std::memory_order_acquire);
    uint32_t read = in.read.load(std::memory_order_relaxed);
    while (done < bytes && read != seen) {
      RingPart part(in.ring(), capacity_, read);
      Packet packet;
      part.get(&packet, sizeof packet);
      if (packet.stream == stream) {
        part.get(data + done, packet.bytes);
        done += packet.bytes;
      } else {
        auto& kept = inbox.kept[packet.stream];
        kept.resize(kept.size() + packet.bytes);
        part.get(kept.data() + kept.size() - packet.bytes, packet.bytes);
      }
      read += packet.bytes_in_ring();
      in.read.store(read, std::memory_order_seq_cst);
      wake_sleepers(in.read, in.writers);
    }
    lock.unlock();
    if (done == bytes) {
      return;
    }
    // Packets of other streams give no more time.
    if (done != done_before) {
      end = end_of_wait();
    } else if (Clock::now() >= end) {
      throw_timeout(from);
    }
    wait_for_change(in.written, in.readers, from, end, [&] {
      return in.written.load(std::memory_order_acquire) != seen;
    });
  }
}

void Pipes::wait_for_change(
    FutexWord& word,
    FutexWord& sleepers,
    int peer,
    Clock::time_point end,
    const std::function<bool()>& changed) {
  Patience patience = channel_.patience();
  patience.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
  const auto check = [&] {
    const auto error = channel_.why_hopeless(peer);
    // A last look: the peer may have written just before it died.
    if (error && !changed()) {
      channel_.abort(error->what());
      throw ChannelError(*error);
    }
  };
  if (!wait_until(word, sleepers, patience, changed, check)) {
    throw_timeout(peer);
  }
}

void Pipes::throw_timeout(int peer) {
  const ChannelError error(
      ChannelError::Kind::Timeout,
      channel_.time_is_up() + channel_.name_of({&peer, 1}) +
          " did not come. Alive but elsewhere: look there for the send or recv of this rank and tag, or raise the timeout if that rank is only slow.");
  channel_.abort(error.what());
  throw ChannelError(error);
}

} // namespace tessera::comm::shm
