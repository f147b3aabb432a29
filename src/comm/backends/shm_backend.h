// The c10d backend for ranks that share a host.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/backends/backends.h"
#include "comm/backends/messenger.h"
#include "comm/shm/channel.h"
#include "comm/shm/collectives.h"
#include "comm/shm/op_queue.h"
#include "comm/shm/peer_processes.h"
#include "comm/shm/pipes.h"
#include "comm/shm/segment.h"
#include "comm/shm/shared_buffers.h"

namespace tessera::comm {

/// Operations on CPU tensors through memory that all ranks map. What only c10d
/// asks for goes to a Gloo backend that is made when first needed: lists of
/// tensors, and messages, which have c10d's own rules there.
///
/// Groups use the Carrier; its collectives take the call that the ranks
/// compare. c10d uses the Backend, whose calls are described by their tensors
/// and counted apart.
///
/// With `async` (or `asyncOp`) false an operation runs on the calling thread
/// and is done when the call returns. See [Note: who runs an operation].
class ShmBackend : public c10d::Backend, public Carrier {
 public:
  explicit ShmBackend(const BackendConfig& config);
  ~ShmBackend() override;

  const std::string getBackendName() const override {
    return "shm";
  }

  /// Gives the group up: waits of this rank end, and peers that wait for it
  /// over Gloo fail at once.
  void abort() override;

  // As a Carrier.
  BackendPtr backend() override;
  void give_up(const std::string& reason) override;
  WorkPtr all_gather(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      bool async) override;
  WorkPtr reduce_scatter(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      const c10d::ReduceOp& op,
      bool async) override;
  WorkPtr all_reduce(
      const Call& call,
      at::Tensor tensor,
      const c10d::ReduceOp& op,
      bool async) override;
  WorkPtr broadcast(const Call& call, at::Tensor tensor, int root, bool async)
      override;
  WorkPtr all_to_all(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      std::vector<int64_t> output_splits,
      std::vector<int64_t> input_splits,
      bool async) override;
  WorkPtr barrier(const Call& call, bool async) override;
  WorkPtr gather(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      int root,
      bool async) override;
  WorkPtr scatter(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      int root,
      bool async) override;
  WorkPtr reduce(
      const Call& call,
      at::Tensor tensor,
      int root,
      const c10d::ReduceOp& op,
      bool async) override;
  WorkPtr send(
      const Call& call,
      const at::Tensor& tensor,
      int to,
      int tag,
      bool async) override;
  WorkPtr recv(
      const Call& call,
      const at::Tensor& tensor,
      int from,
      int tag,
      bool async) override;
  WorkPtr all_to_all_pieces(
      const Call& call,
      const std::vector<Tensors>& outputs,
      const std::vector<Tensors>& inputs) override;
  at::Tensor allocate_shared(at::IntArrayRef sizes, at::ScalarType dtype)
      override;

  // As a c10d::Backend, the same collectives.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options)
      override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& options) override;
  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;

  // As a c10d::Backend, through Gloo.
  WorkPtr alltoall(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllToAllOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& options) override;
  WorkPtr scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  WorkPtr run(
      const Call& call,
      c10d::OpType type,
      bool async,
      Tensors outputs,
      std::function<void()> operation);
  /// The call that an operation of c10d stands for.
  Call make_call(const char* operation, const at::Tensor& input = {});
  /// `call`, with the place of `input` if `input` is shared memory.
  Call with_shared_input(Call call, const at::Tensor& input) const;
  c10d::Backend& gloo();
  c10d::Backend& gloo_for(const char* operation);

  // Constant after construction.
  const BackendConfig config_;
  shm::Segment segment_;
  std::unique_ptr<shm::PeerProcesses> peers_;
  std::shared_ptr<shm::SharedBuffers> buffers_;
  std::unique_ptr<shm::Channel> channel_;
  std::unique_ptr<shm::Collectives> collectives_;
  std::unique_ptr<shm::Pipes> pipes_;

  // Shared with the works that were handed out; stopped by the destructor,
  // while the members that operations use still exist. Has its own lock.
  std::shared_ptr<shm::OpQueue> queue_;

  // Touched by the one thread that uses the group.
  std::unique_ptr<Messenger> messenger_;
  BackendPtr gloo_; // made by the first call that needs it
  uint64_t sequence_ = 0; // of calls by c10d
  uint64_t num_allocations_ = 0;
};

} // namespace tessera::comm
