// Collectives over a Channel. No LibTorch here: tests run ranks as threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/shm/channel.h"

namespace tessera::comm::shm {

/// out[i] = reduction over r of inputs[r][i], in the order of the ranks, so
/// that every rank computes the same bits. `out` may be one of the inputs.
using ReduceKernel = void (*)(
    void* out,
    const void* const* inputs,
    int num_inputs,
    size_t numel);

struct Reduction {
  ReduceKernel kernel = nullptr;
  size_t element_bytes = 0;
};

/// All calls are collective and block until this rank may touch its buffers
/// again. Each first exchanges the `call`s and throws Mismatch on all ranks,
/// before any data has moved, when they differ.
///
/// An input of all_gather or reduce_scatter that is inside shared memory
/// (call.segment) is read by the peers where it lies: one copy less, one wait
/// more.
class Collectives {
 public:
  /// Address in this process of `offset` in shared segment `segment`.
  using Resolver =
      std::function<const std::byte*(uint64_t segment, uint64_t offset)>;

  Collectives(Channel& channel, Resolver resolve);

  void barrier(const Call& call);

  /// out: size * bytes. `in` may be this rank's part of `out`.
  void all_gather(
      const Call& call,
      const std::byte* in,
      std::byte* out,
      size_t bytes);

  /// in: size * bytes, out: bytes. `out` may be this rank's part of `in`.
  void reduce_scatter(
      const Call& call,
      const std::byte* in,
      std::byte* out,
      size_t bytes,
      const Reduction& reduction);

  void all_reduce(
      const Call& call,
      std::byte* data,
      size_t bytes,
      const Reduction& reduction);

  /// `data` of `root` becomes what all_reduce() would give; other ranks' is
  /// left as it is.
  void reduce(
      const Call& call,
      std::byte* data,
      size_t bytes,
      const Reduction& reduction,
      int root);

  void broadcast(const Call& call, std::byte* data, size_t bytes, int root);

  /// out: size * bytes on `root`, where `in` may be the root's part of it; not
  /// used elsewhere.
  void gather(
      const Call& call,
      const std::byte* in,
      std::byte* out,
      size_t bytes,
      int root);

  /// in: size * bytes on `root`, where `out` may be the root's part of it; not
  /// used elsewhere.
  void scatter(
      const Call& call,
      const std::byte* in,
      std::byte* out,
      size_t bytes,
      int root);

  /// The bytes of in[r], one span after another, go to rank r, into the spans
  /// of its out[this rank]. Both must have the same number of bytes.
  struct Span {
    std::byte* data = nullptr;
    size_t bytes = 0;
    bool operator==(const Span&) const = default;
  };
  using Spans = std::vector<Span>;
  void all_to_all(
      const Call& call,
      const std::vector<Spans>& in,
      const std::vector<Spans>& out);

 private:
  /// Where each rank's input lies if it is shared memory, else nullptr. All
  /// ranks compute the same pattern, since they see the same calls.
  struct Sources {
    std::vector<const std::byte*> direct;
    bool any_direct = false;
    bool all_direct = true;
  };

  Sources exchange_calls();
  /// `receives`: this rank's data becomes the result.
  void reduce_for(
      const Call& call,
      std::byte* data,
      size_t bytes,
      const Reduction& reduction,
      bool receives);
  void reduce_in_one_phase(
      const Call& call,
      std::byte* data,
      size_t bytes,
      const Reduction& reduction,
      bool receives);
  void reduce_in_two_phases(
      const Call& call,
      std::byte* data,
      size_t bytes,
      const Reduction& reduction,
      bool receives);
  void wait_until_inputs_are_read();

  // Constant after construction.
  Channel& channel_;
  const Resolver resolve_;
};

} // namespace tessera::comm::shm
