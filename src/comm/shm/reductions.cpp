// Reductions of whole tensors, for every rank or for one.
#include <algorithm>

#include "comm/shm/collectives.h"
#include "comm/shm/copying.h"

namespace tessera::comm::shm {
namespace {

/// Up to this size every rank reduces everything itself: one wait instead of
/// two. The best times of both cross near here, on 2 ranks and on 4, measured
/// on a busy host, where 256 KB on 2 ranks was an exception.
constexpr size_t kOnePhaseBytes = 8 * 1024;

} // namespace

void Collectives::all_reduce(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction) {
  reduce_for(call, data, bytes, reduction, /*receives=*/true);
}

void Collectives::reduce(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction,
    int root) {
  reduce_for(call, data, bytes, reduction, channel_.rank() == root);
}

void Collectives::reduce_for(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction,
    bool receives) {
  if (bytes <= kOnePhaseBytes) {
    reduce_in_one_phase(call, data, bytes, reduction, receives);
  } else {
    reduce_in_two_phases(call, data, bytes, reduction, receives);
  }
}

void Collectives::reduce_in_one_phase(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction,
    bool receives) {
  const auto size = static_cast<size_t>(channel_.size());
  std::vector<const void*> inputs(size);
  size_t done = 0;
  do {
    const size_t count = std::min(bytes - done, channel_.slot_bytes());
    copy_bytes(channel_.begin_step(), data + done, count);
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      exchange_calls();
    }
    for (size_t peer = 0; receives && peer < size; ++peer) {
      inputs[peer] = channel_.wait_for(static_cast<int>(peer));
    }
    if (receives) {
      reduction.kernel(
          data + done,
          inputs.data(),
          channel_.size(),
          count / reduction.element_bytes);
    }
    done += count;
  } while (done < bytes);
}

/// [Note: a reduction in two phases]
///
/// Each chunk takes two steps. Rank r reduces the r-th piece of the chunk, and
/// every element is reduced by one rank, in the order of the ranks: all ranks
/// get the same bits, and those of one phase.
///
///   1. In the first step the slot holds the pieces that the *peers* reduce;
///      the own piece is read where it lies. Nobody else reads or writes it.
///   2. A rank that receives reduces its piece in place and copies the result
///      into the slot of the second step: the kernel writes memory that no peer
///      has in its cache, and only copies meet the slots. A rank that does not
///      receive reduces straight into the slot, and its data stays as it is.
///   3. The peers' slots of the first step are read before this rank publishes
///      the second, so none of them has been used again ([Note: shared-memory
///      steps]).
void Collectives::reduce_in_two_phases(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction,
    bool receives) {
  const auto me = static_cast<size_t>(channel_.rank());
  const auto size = static_cast<size_t>(channel_.size());
  std::vector<const void*> inputs(size);
  size_t done = 0;
  while (done < bytes) {
    const size_t count = std::min(bytes - done, channel_.slot_bytes());
    const size_t piece = (count / size + kAlign) / kAlign * kAlign;
    auto begin_of = [&](size_t rank) { return std::min(count, rank * piece); };
    auto bytes_of = [&](size_t rank) {
      return begin_of(rank + 1) - begin_of(rank);
    };

    std::byte* slot = channel_.begin_step();
    const size_t own_end = begin_of(me + 1);
    copy_bytes(slot, data + done, begin_of(me));
    copy_bytes(slot + own_end, data + done + own_end, count - own_end);
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      exchange_calls();
    }
    for (size_t peer = 0; peer < size; ++peer) {
      const std::byte* theirs =
          peer == me ? data + done : channel_.wait_for(static_cast<int>(peer));
      inputs[peer] = theirs + begin_of(me);
    }

    std::byte* own = data + done + begin_of(me);
    std::byte* reduced = channel_.begin_step();
    reduction.kernel(
        receives ? own : reduced,
        inputs.data(),
        channel_.size(),
        bytes_of(me) / reduction.element_bytes);
    if (receives) {
      copy_bytes(reduced, own, bytes_of(me));
    }
    channel_.publish();
    for (size_t i = 1; receives && i < size; ++i) {
      const size_t peer = (me + i) % size;
      copy_bytes(
          data + done + begin_of(peer),
          channel_.wait_for(static_cast<int>(peer)),
          bytes_of(peer));
    }
    done += count;
  }
}

} // namespace tessera::comm::shm
