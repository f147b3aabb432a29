// Collectives in which one rank, the root, gives or gets more than the others.
#include <algorithm>

#include "comm/shm/collectives.h"
#include "comm/shm/copying.h"

namespace tessera::comm::shm {

void Collectives::broadcast(
    const Call& call,
    std::byte* data,
    size_t bytes,
    int root) {
  const bool sends = channel_.rank() == root;
  size_t done = 0;
  do {
    const size_t count = std::min(bytes - done, channel_.slot_bytes());
    std::byte* slot = channel_.begin_step();
    if (sends) {
      copy_bytes(slot, data + done, count);
    }
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      exchange_calls();
    }
    if (!sends) {
      copy_bytes(data + done, channel_.wait_for(root), count);
    }
    done += count;
  } while (done < bytes);
}

void Collectives::gather(
    const Call& call,
    const std::byte* in,
    std::byte* out,
    size_t bytes,
    int root) {
  const bool receives = channel_.rank() == root;
  size_t done = 0;
  do {
    const size_t count = std::min(bytes - done, channel_.slot_bytes());
    std::byte* slot = channel_.begin_step();
    if (!receives) {
      copy_bytes(slot, in + done, count);
    }
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      exchange_calls();
    }
    for (int i = 0; receives && i < channel_.size(); ++i) {
      const std::byte* theirs = i == root ? in + done : channel_.wait_for(i);
      copy_bytes(out + static_cast<size_t>(i) * bytes + done, theirs, count);
    }
    done += count;
  } while (done < bytes);
}

void Collectives::scatter(
    const Call& call,
    const std::byte* in,
    std::byte* out,
    size_t bytes,
    int root) {
  const auto me = static_cast<size_t>(channel_.rank());
  const auto size = static_cast<size_t>(channel_.size());
  const bool sends = channel_.rank() == root;
  const size_t piece = channel_.slot_bytes() / size / kAlign * kAlign;
  size_t done = 0;
  do {
    const size_t count = std::min(bytes - done, piece);
    std::byte* slot = channel_.begin_step();
    for (size_t peer = 0; sends && peer < size; ++peer) {
      if (peer != me) {
        copy_bytes(slot + peer * piece, in + peer * bytes + done, count);
      }
    }
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      exchange_calls();
    }
    copy_bytes(
        out + done,
        sends ? in + me * bytes + done : channel_.wait_for(root) + me * piece,
        count);
    done += count;
  } while (done < bytes);
}

} // namespace tessera::comm::shm
