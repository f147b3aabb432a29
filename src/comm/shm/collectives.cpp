#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/shm/copying.h"

namespace tessera::comm::shm {
namespace {

/// How a rank sends parts of different sizes through its slot: each step has a
/// piece for every peer that gets anything, or one for all if they get the
/// same.
struct Mailing {
  Mailing(std::vector<size_t> parts, bool is_same, size_t slot_bytes)
      : bytes(std::move(parts)), place(bytes.size()) {
    size_t receivers = 0;
    for (size_t peer = 0; peer < bytes.size(); ++peer) {
      place[peer] = is_same ? 0 : receivers;
      receivers += bytes[peer] == 0 || (is_same && receivers != 0) ? 0 : 1;
    }
    piece = slot_bytes / std::max<size_t>(receivers, 1) / kAlign * kAlign;
    for (const size_t part : bytes) {
      num_steps = std::max(num_steps, (part + piece - 1) / piece);
    }
  }
  size_t count(size_t step, size_t peer) const {
    return std::min(bytes[peer], (step + 1) * piece) -
        std::min(bytes[peer], step * piece);
  }
  size_t offset(size_t peer) const {
    return place[peer] * piece;
  }

  std::vector<size_t> bytes; // by peer
  std::vector<size_t> place; // by peer: which piece of the slot
  size_t piece = 0;
  size_t num_steps = 0;
};

/// Goes through spans from the first to the last byte.
class Cursor {
 public:
  explicit Cursor(const Collectives::Spans& spans) : spans_(spans) {}

  /// Calls move(span's bytes, how many) until `count` bytes are through.
  template <class Move>
  void advance(size_t count, const Move& move) {
    while (count > 0) {
      const Collectives::Span& span = spans_[index_];
      const size_t now = std::min(count, span.bytes - done_);
      move(span.data + done_, now);
      count -= now;
      done_ += now;
      if (done_ == span.bytes) {
        ++index_;
        done_ = 0;
      }
    }
  }

  void read(std::byte* to, size_t count) {
    advance(count, [&to](const std::byte* from, size_t bytes) {
      copy_bytes(to, from, bytes);
      to += bytes;
    });
  }
  void write(const std::byte* from, size_t count) {
    advance(count, [&from](std::byte* to, size_t bytes) {
      copy_bytes(to, from, bytes);
      from += bytes;
    });
  }

 private:
  const Collectives::Spans& spans_;
  size_t index_ = 0;
  size_t done_ = 0; // of that span
};

size_t total(const Collectives::Spans& spans) {
  size_t bytes = 0;
  for (const Collectives::Span& span : spans) {
    bytes += span.bytes;
  }
  return bytes;
}

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

void Collectives::all_to_all(
    const Call& call,
    const std::vector<Spans>& in,
    const std::vector<Spans>& out) {
  const auto me = static_cast<size_t>(channel_.rank());
  const auto size = static_cast<size_t>(channel_.size());

  // First the sizes of all ranks, which give the number of steps.
  std::vector<size_t> row; // by peer, then whether all get the same
  bool is_same = true;
  for (size_t peer = 0; peer < size; ++peer) {
    row.push_back(peer == me ? 0 : total(in[peer]));
    is_same = is_same && (peer == me || in[peer] == in[(me + 1) % size]);
  }
  row.push_back(is_same ? 1 : 0);
  const size_t row_bytes = row.size() * sizeof(size_t);
  std::memcpy(channel_.begin_step(), row.data(), row_bytes);
  channel_.publish(&call);
  exchange_calls();
  std::vector<Mailing> mailings;
  size_t num_steps = 0;
  for (size_t peer = 0; peer < size; ++peer) {
    std::memcpy(
        row.data(), channel_.wait_for(static_cast<int>(peer)), row_bytes);
    mailings.emplace_back(
        std::vector<size_t>(row.begin(), row.end() - 1),
        row.back() == 1,
        channel_.slot_bytes());
    num_steps = std::max(num_steps, mailings.back().num_steps);
  }

  std::vector<Cursor> from(in.begin(), in.end());
  std::vector<Cursor> to(out.begin(), out.end());
  from[me].advance(total(in[me]), [&](const std::byte* data, size_t bytes) {
    to[me].write(data, bytes);
  });
  const Mailing& mine = mailings[me];
  for (size_t step = 0; step < num_steps; ++step) {
    std::byte* slot = channel_.begin_step();
    for (size_t i = 1; i < size; ++i) {
      const size_t peer = (me + i) % size;
      if (i == 1 || !is_same) {
        from[peer].read(slot + mine.offset(peer), mine.count(step, peer));
      }
    }
    channel_.publish();
    for (size_t i = 1; i < size; ++i) {
      const size_t peer = (me + i) % size;
      const Mailing& theirs = mailings[peer];
      to[peer].write(
          channel_.wait_for(static_cast<int>(peer)) + theirs.offset(me),
          theirs.count(step, me));
    }
  }
}

} // namespace tessera::comm::shm
