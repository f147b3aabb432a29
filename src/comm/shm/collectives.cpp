#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace tessera::comm::shm {
namespace {

constexpr size_t kAlign = 64;
/// Up to here every rank reduces everything itself: one wait instead of two.
constexpr size_t kOnePhaseBytes = 32 * 1024;

void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  if (to != from && bytes != 0) {
    std::memcpy(to, from, bytes);
  }
}

size_t round_up(size_t value, size_t unit) {
  return (value + unit - 1) / unit * unit;
}

/// How a rank sends parts of different sizes through its slot: each step has a
/// piece for every peer that gets anything.
struct Mailing {
  Mailing(std::vector<size_t> parts, size_t slot_bytes)
      : bytes(std::move(parts)), place(bytes.size()) {
    size_t receivers = 0;
    for (size_t peer = 0; peer < bytes.size(); ++peer) {
      place[peer] = receivers;
      receivers += bytes[peer] == 0 ? 0 : 1;
    }
    piece = slot_bytes / std::max<size_t>(receivers, 1) / kAlign * kAlign;
    for (const size_t part : bytes) {
      num_steps = std::max(num_steps, (part + piece - 1) / piece);
    }
  }
  size_t begin(size_t step, size_t peer) const {
    return std::min(bytes[peer], step * piece);
  }
  size_t count(size_t step, size_t peer) const {
    return begin(step + 1, peer) - begin(step, peer);
  }
  size_t offset(size_t peer) const {
    return place[peer] * piece;
  }

  std::vector<size_t> bytes; // by peer
  std::vector<size_t> place; // by peer: which piece of the slot
  size_t piece = 0;
  size_t num_steps = 0;
};

} // namespace

Collectives::Collectives(Channel& channel, Resolver resolve)
    : channel_(channel), resolve_(std::move(resolve)) {}

Collectives::Sources Collectives::exchange_calls() {
  channel_.wait_for_all();
  channel_.check_calls();
  Sources sources;
  for (int peer = 0; peer < channel_.size(); ++peer) {
    const Call& call = channel_.call_of(peer);
    const bool direct = call.segment != Call::kNoSegment;
    const std::byte* source = nullptr;
    try {
      source = direct ? resolve_(call.segment, call.offset) : nullptr;
    } catch (const std::exception& error) {
      channel_.give_up(error.what());
    }
    sources.direct.push_back(source);
    sources.any_direct = sources.any_direct || direct;
    sources.all_direct = sources.all_direct && direct;
  }
  return sources;
}

void Collectives::wait_until_inputs_are_read() {
  channel_.begin_step();
  channel_.publish();
  channel_.wait_for_all();
}

void Collectives::barrier(const Call& call) {
  channel_.begin_step();
  channel_.publish(&call);
  channel_.wait_for_all();
  channel_.check_calls();
}

void Collectives::all_gather(
    const Call& call,
    const std::byte* in,
    std::byte* out,
    size_t bytes) {
  const int me = channel_.rank();
  const int size = channel_.size();
  Sources sources;
  size_t done = 0;
  do {
    size_t count = std::min(bytes - done, channel_.slot_bytes());
    std::byte* slot = channel_.begin_step();
    if (call.segment == Call::kNoSegment) {
      copy_bytes(slot, in + done, count);
    }
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      sources = exchange_calls();
      if (sources.all_direct) {
        count = bytes;
      }
      copy_bytes(out + static_cast<size_t>(me) * bytes, in, bytes);
    }
    for (int i = 1; i < size; ++i) {
      const int peer = (me + i) % size;
      const std::byte* theirs = channel_.wait_for(peer);
      const std::byte* direct = sources.direct[static_cast<size_t>(peer)];
      copy_bytes(
          out + static_cast<size_t>(peer) * bytes + done,
          direct != nullptr ? direct + done : theirs,
          count);
    }
    done += count;
  } while (done < bytes);
  if (sources.any_direct) {
    wait_until_inputs_are_read();
  }
}

void Collectives::reduce_scatter(
    const Call& call,
    const std::byte* in,
    std::byte* out,
    size_t bytes,
    const Reduction& reduction) {
  const auto me = static_cast<size_t>(channel_.rank());
  const auto size = static_cast<size_t>(channel_.size());
  const size_t piece = channel_.slot_bytes() / size / kAlign * kAlign;
  std::vector<const void*> inputs(size);
  Sources sources;
  size_t done = 0;
  do {
    size_t count = std::min(bytes - done, piece);
    std::byte* slot = channel_.begin_step();
    for (size_t peer = 0; peer < size; ++peer) {
      if (peer != me && call.segment == Call::kNoSegment) {
        copy_bytes(slot + peer * piece, in + peer * bytes + done, count);
      }
    }
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      sources = exchange_calls();
      if (sources.all_direct) {
        count = bytes;
      }
    }
    for (size_t peer = 0; peer < size; ++peer) {
      const std::byte* theirs = channel_.wait_for(static_cast<int>(peer));
      const std::byte* direct = sources.direct[peer];
      inputs[peer] = peer == me ? in + me * bytes + done
          : direct != nullptr   ? direct + me * bytes + done
                                : theirs + me * piece;
    }
    reduction.kernel(
        out + done,
        inputs.data(),
        channel_.size(),
        count / reduction.element_bytes);
    done += count;
  } while (done < bytes);
  if (sources.any_direct) {
    wait_until_inputs_are_read();
  }
}

void Collectives::all_reduce(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction) {
  if (channel_.size() <= 2 || bytes <= kOnePhaseBytes) {
    all_reduce_in_one_phase(call, data, bytes, reduction);
  } else {
    all_reduce_in_two_phases(call, data, bytes, reduction);
  }
}

void Collectives::all_reduce_in_one_phase(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction) {
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
    for (size_t peer = 0; peer < size; ++peer) {
      inputs[peer] = channel_.wait_for(static_cast<int>(peer));
    }
    reduction.kernel(
        data + done,
        inputs.data(),
        channel_.size(),
        count / reduction.element_bytes);
    done += count;
  } while (done < bytes);
}

void Collectives::all_reduce_in_two_phases(
    const Call& call,
    std::byte* data,
    size_t bytes,
    const Reduction& reduction) {
  const auto me = static_cast<size_t>(channel_.rank());
  const auto size = static_cast<size_t>(channel_.size());
  std::vector<const void*> inputs(size);
  size_t done = 0;
  while (done < bytes) {
    const size_t count = std::min(bytes - done, channel_.slot_bytes());
    const size_t piece = round_up((count + size - 1) / size, kAlign);
    // Rank r reduces [r * piece, (r + 1) * piece) of this chunk.
    auto begin_of = [&](size_t rank) { return std::min(count, rank * piece); };
    auto bytes_of = [&](size_t rank) {
      return begin_of(rank + 1) - begin_of(rank);
    };

    copy_bytes(channel_.begin_step(), data + done, count);
    channel_.publish(done == 0 ? &call : nullptr);
    if (done == 0) {
      exchange_calls();
    }
    for (size_t peer = 0; peer < size; ++peer) {
      inputs[peer] = channel_.wait_for(static_cast<int>(peer)) + begin_of(me);
    }

    // The result goes straight into the slot of the second step.
    std::byte* reduced = channel_.begin_step();
    reduction.kernel(
        reduced,
        inputs.data(),
        channel_.size(),
        bytes_of(me) / reduction.element_bytes);
    channel_.publish();
    for (size_t i = 0; i < size; ++i) {
      const size_t peer = (me + i) % size;
      copy_bytes(
          data + done + begin_of(peer),
          channel_.wait_for(static_cast<int>(peer)),
          bytes_of(peer));
    }
    done += count;
  }
}

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

void Collectives::all_to_all(
    const Call& call,
    const std::byte* in,
    const std::vector<size_t>& in_bytes,
    std::byte* out,
    const std::vector<size_t>& out_bytes) {
  const auto me = static_cast<size_t>(channel_.rank());
  const auto size = static_cast<size_t>(channel_.size());

  // First everybody's sizes: they say how many steps there are.
  const size_t row_bytes = size * sizeof(size_t);
  std::byte* slot = channel_.begin_step();
  std::memcpy(slot, in_bytes.data(), row_bytes);
  channel_.publish(&call);
  exchange_calls();
  std::vector<Mailing> mailings;
  size_t num_steps = 0;
  for (size_t peer = 0; peer < size; ++peer) {
    std::vector<size_t> row(size);
    std::memcpy(
        row.data(), channel_.wait_for(static_cast<int>(peer)), row_bytes);
    row[peer] = 0; // what stays needs no slot
    mailings.emplace_back(row, channel_.slot_bytes());
    num_steps = std::max(num_steps, mailings.back().num_steps);
  }

  std::vector<const std::byte*> from(size);
  std::vector<std::byte*> to(size);
  for (size_t peer = 0; peer < size; ++peer) {
    from[peer] = in;
    to[peer] = out;
    in += in_bytes[peer];
    out += out_bytes[peer];
  }
  copy_bytes(to[me], from[me], in_bytes[me]);
  for (size_t step = 0; step < num_steps; ++step) {
    const Mailing& mine = mailings[me];
    slot = channel_.begin_step();
    for (size_t peer = 0; peer < size; ++peer) {
      copy_bytes(
          slot + mine.offset(peer),
          from[peer] + mine.begin(step, peer),
          mine.count(step, peer));
    }
    channel_.publish();
    for (size_t i = 1; i < size; ++i) {
      const size_t peer = (me + i) % size;
      const Mailing& theirs = mailings[peer];
      copy_bytes(
          to[peer] + theirs.begin(step, me),
          channel_.wait_for(static_cast<int>(peer)) + theirs.offset(me),
          theirs.count(step, me));
    }
  }
}

} // namespace tessera::comm::shm
