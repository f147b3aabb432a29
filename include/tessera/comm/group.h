#pragma once

#include <tessera/api.h>
#include <tessera/comm/reduce_op.h>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// An operation in flight. It keeps its tensors alive; their contents are
/// defined only after wait(). If it is dropped, the operation continues as long
/// as the group is held, but its output must not be read.
class [[nodiscard]] TESSERA_API Work {
 public:
  /// A finished operation.
  Work() = default;
  /// For Group's calls; not part of the public contract.
  class Pending;
  explicit Work(std::shared_ptr<Pending> pending);

  /// Blocks until the operation is complete on this rank (for CUDA tensors:
  /// makes the current stream wait for it). Throws the operation's error, with
  /// its name. Further calls return at once.
  void wait();

  /// True if wait() would not block. Does not throw.
  bool done() const;

 private:
  std::shared_ptr<Pending> pending_;
};

/// Ranks that communicate. A cheap handle, copied freely; copies refer to the
/// same group.
///
/// Unless its comment says otherwise, every call is collective: all ranks of
/// the group make it, in the same order, with the same shapes. `label` says
/// what the data is ("layers.7"); it appears in errors and, where calls are
/// compared, must agree. Calls are always compared over shared memory, and with
/// TESSERA_CHECK=1 over every backend. Otherwise ranks compare their calls over
/// Gloo, labels aside, when they have waited for a second.
///
/// Tensors must be dense and contiguous; sizes and dtypes are checked before
/// anything is sent. Data movement takes every dtype, reductions take the
/// dtypes that the backend can add. CUDA tensors are sent over NCCL, or through
/// host memory if the group has no NCCL. A group of one does not communicate.
///
/// After a TimeoutError or PeerLostError the group is dead: every later call
/// fails with the first reason. So it is after a DisagreementError of ranks
/// that waited. One thread at a time may use a group.
class TESSERA_API Group {
 public:
  /// No group; every call except valid() throws.
  Group() = default;
  /// For the layers above; not part of the public contract.
  class Impl;
  explicit Group(std::shared_ptr<Impl> impl);

  /// False for a default-constructed Group(). Not collective, like all
  /// functions up to timeout().
  bool valid() const {
    return impl_ != nullptr;
  }

  int rank() const; // this process's number within this group
  int size() const; // how many ranks it has
  const std::string& name() const; // the group's name in messages
  /// Ranks of the world that form this group, in its order.
  const std::vector<int>& global_ranks() const;
  /// "shm", "gloo", "nccl" or "fake"; "none" in a group of one. For a device
  /// without a backend of its own, the backend of the CPU, through which its
  /// tensors are sent.
  std::string backend(c10::DeviceType device = c10::DeviceType::CPU) const;
  /// How long a call may wait for a peer.
  std::chrono::milliseconds timeout() const;

  /// `output` has size() times the elements of `input`; its r-th part becomes
  /// the input of rank r. `input` may be this rank's part of `output`.
  void all_gather_into(
      const at::Tensor& output,
      const at::Tensor& input,
      std::string_view label = {}) const;
  Work all_gather_into_async(
      const at::Tensor& output,
      const at::Tensor& input,
      std::string_view label = {}) const;

  /// `input` has size() times the elements of `output`; this rank gets the
  /// reduction of the ranks' rank()-th parts. `output` may be that part of
  /// `input`; the other parts of `input` are undefined afterwards.
  void reduce_scatter(
      const at::Tensor& output,
      const at::Tensor& input,
      ReduceOp op = ReduceOp::Sum,
      std::string_view label = {}) const;
  Work reduce_scatter_async(
      const at::Tensor& output,
      const at::Tensor& input,
      ReduceOp op = ReduceOp::Sum,
      std::string_view label = {}) const;

  /// In place; the same bits on every rank.
  void all_reduce(
      const at::Tensor& tensor,
      ReduceOp op = ReduceOp::Sum,
      std::string_view label = {}) const;
  Work all_reduce_async(
      const at::Tensor& tensor,
      ReduceOp op = ReduceOp::Sum,
      std::string_view label = {}) const;

  /// In place: every rank gets what `root` (a rank of this group) has.
  void broadcast(
      const at::Tensor& tensor,
      int root,
      std::string_view label = {}) const;
  Work broadcast_async(
      const at::Tensor& tensor,
      int root,
      std::string_view label = {}) const;

  /// Part r of `input` goes to rank r, part r of `output` comes from it. Parts
  /// are equal, unless splits (sizes on dim 0, one per rank) say otherwise.
  /// `output` and `input` must not overlap.
  void all_to_all(
      const at::Tensor& output,
      const at::Tensor& input,
      std::string_view label = {}) const;
  Work all_to_all_async(
      const at::Tensor& output,
      const at::Tensor& input,
      std::string_view label = {}) const;
  void all_to_all(
      const at::Tensor& output,
      const at::Tensor& input,
      at::IntArrayRef output_splits,
      at::IntArrayRef input_splits,
      std::string_view label = {}) const;

  /// The same with parts in pieces: the pieces of inputs[r] are sent to rank r
  /// and fill, one after another, the pieces that its outputs have for this
  /// rank. Pieces may be of any dtype and number; the bytes that one rank
  /// sends must be those that the other expects. All pieces are on one device;
  /// if that is not the CPU, a rank without pieces passes an empty one. Over
  /// shared memory nothing is packed.
  void all_to_all(
      const std::vector<std::vector<at::Tensor>>& outputs,
      const std::vector<std::vector<at::Tensor>>& inputs,
      std::string_view label = {}) const;

  /// `root` gets each rank's input: its output has size() times the elements of
  /// input, rank r's as r-th part; the root's input may be its part of output.
  /// Other ranks pass no output. This call and the next two are compared over
  /// every backend, and an output or input that only `root` has and that does
  /// not fit is an error on every rank. Over Gloo and NCCL the comparison is
  /// made when the call is made, so there the asynchronous forms of the three
  /// wait until all ranks have made the call.
  void gather(
      const at::Tensor& output,
      const at::Tensor& input,
      int root,
      std::string_view label = {}) const;
  Work gather_async(
      const at::Tensor& output,
      const at::Tensor& input,
      int root,
      std::string_view label = {}) const;

  /// Rank r gets the r-th part of the root's input, which has size() times the
  /// elements of output; the root's output may be its part of input. Other
  /// ranks pass no input.
  void scatter(
      const at::Tensor& output,
      const at::Tensor& input,
      int root,
      std::string_view label = {}) const;
  Work scatter_async(
      const at::Tensor& output,
      const at::Tensor& input,
      int root,
      std::string_view label = {}) const;

  /// The tensor of `root` becomes the reduction of all ranks' tensors; over
  /// shared memory it gets the bits that all_reduce gives. Other ranks' tensors
  /// stay as they are.
  void reduce(
      const at::Tensor& tensor,
      int root,
      ReduceOp op = ReduceOp::Sum,
      std::string_view label = {}) const;
  Work reduce_async(
      const at::Tensor& tensor,
      int root,
      ReduceOp op = ReduceOp::Sum,
      std::string_view label = {}) const;

  /// Sends a message to rank `to`, which calls recv(..., rank(), tag). Not
  /// collective. Messages of one tag between two ranks arrive in the order in
  /// which they are sent; messages of different tags may be received in any
  /// order. Tags are 0 to 2^28 - 1. Dtype, number of elements and label must be
  /// those of the recv; otherwise both sides throw a DisagreementError, nothing
  /// is received, and both may continue.
  ///
  /// send() returns when the receiver has called recv() and the tensor may be
  /// written to again. So two ranks that both send first and then receive wait
  /// for each other until their timeout: let one of them use send_async().
  /// CUDA tensors are sent through host memory.
  void send(
      const at::Tensor& tensor,
      int to,
      int tag = 0,
      std::string_view label = {}) const;
  /// Makes progress even if nobody waits for it. Its timeout begins when the
  /// earlier messages of this tag are done.
  Work send_async(
      const at::Tensor& tensor,
      int to,
      int tag = 0,
      std::string_view label = {}) const;

  /// Receives the next message of `tag` from rank `from`; see send(). Not
  /// collective.
  void recv(
      const at::Tensor& tensor,
      int from,
      int tag = 0,
      std::string_view label = {}) const;
  Work recv_async(
      const at::Tensor& tensor,
      int from,
      int tag = 0,
      std::string_view label = {}) const;

  /// Returns when all ranks have called it.
  void barrier(std::string_view label = {}) const;
  Work barrier_async(std::string_view label = {}) const;

  /// Each rank's bytes, of any length, by rank.
  std::vector<std::vector<uint8_t>> all_gather_bytes(
      std::span<const uint8_t> bytes,
      std::string_view label = {}) const;
  /// Returns the bytes that `root` passes; the argument of other ranks is
  /// ignored.
  std::vector<uint8_t> broadcast_bytes(
      std::span<const uint8_t> bytes,
      int root,
      std::string_view label = {}) const;
  /// On `root` each rank's bytes, by rank; empty elsewhere. Only `root` needs
  /// memory for them.
  std::vector<std::vector<uint8_t>> gather_bytes(
      std::span<const uint8_t> bytes,
      int root,
      std::string_view label = {}) const;

  /// Divides the group: ranks with equal `color` form a group, ordered by
  /// (key, rank). A rank with a negative color joins no group and gets nothing.
  std::optional<Group> split(int color, int key = 0, std::string_view name = {})
      const;
  /// The group of `ranks` (of this group, in the given order), or nothing on a
  /// rank that is not among them. Collective over *this* group.
  std::optional<Group> subgroup(
      const std::vector<int>& ranks,
      std::string_view name = {}) const;

  /// This rank by itself. Not collective.
  Group alone() const;

  /// True if all ranks share a host and the CPU backend is shared memory. Not
  /// collective.
  bool shares_memory() const;
  /// One tensor whose memory all ranks of the group map: what one rank writes
  /// the others see after a barrier(). Zero-filled. As the input of
  /// all_gather_into or reduce_scatter the peers read it in place, which saves
  /// a copy; if the output is the same memory, nothing is copied at all. Every
  /// rank must keep it as long as any rank passes it to a collective. Throws
  /// unless shares_memory().
  at::Tensor allocate_shared(at::IntArrayRef sizes, at::ScalarType dtype) const;

  /// Not collective. For the layers above; not part of the public contract.
  Impl& impl() const;

 private:
  std::shared_ptr<Impl> impl_;
};

} // namespace tessera
