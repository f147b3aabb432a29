// The c10d backend for ranks that share a host.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/backends/backends.h"
#include "comm/shm/channel.h"
#include "comm/shm/collectives.h"
#include "comm/shm/op_queue.h"
#include "comm/shm/peers.h"
#include "comm/shm/segment.h"
#include "comm/shm/shared_buffers.h"

namespace tessera::comm {

/// Collectives on CPU tensors through memory that all ranks map: all-gather,
/// reduce-scatter, all-reduce, broadcast, all-to-all and barrier; everything
/// else goes to a Gloo backend that is made when first needed.
///
/// With `asyncOp = false` an operation runs on the calling thread and is done
/// when the call returns. See [Note: who runs an operation].
class ShmBackend : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  explicit ShmBackend(const BackendConfig& config);
  ~ShmBackend() override;

  const std::string getBackendName() const override {
    return "shm";
  }

  /// Gives the group up: waits of this rank end, and peers that wait for it
  /// over Gloo fail at once.
  void abort() override;

  /// The call that the next operation of this thread stands for; without one
  /// it is described by its tensors.
  static void set_next_call(const Call* call);

  /// Memory that all ranks map, zero-filled. Collective.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype);

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
  /// The same with the parts of each rank in pieces, contiguous ones.
  WorkPtr alltoall_pieces(
      const std::vector<Tensors>& outputs,
      const std::vector<Tensors>& inputs);

  // Through Gloo.
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
      c10d::OpType type,
      bool async,
      Tensors outputs,
      std::function<void()> operation);
  Call make_call(const char* operation, const at::Tensor& input);
  void mark_shared_input(Call& call, const at::Tensor& input) const;
  c10d::Backend& gloo();
  c10d::Backend& gloo_for(const char* operation, const at::Tensor& input);

  // Constant after construction.
  const BackendConfig config_;
  shm::Segment segment_;
  std::unique_ptr<shm::Peers> peers_;
  std::shared_ptr<shm::SharedBuffers> buffers_;
  std::unique_ptr<shm::Channel> channel_;
  std::unique_ptr<shm::Collectives> collectives_;

  BackendPtr gloo_; // made by the first call that needs it
  uint64_t sequence_ = 0; // of calls that bring no description
  uint64_t num_allocations_ = 0;

  // Shared with the works it hands out; stopped before the rest goes.
  std::shared_ptr<shm::OpQueue> queue_;
};

} // namespace tessera::comm
