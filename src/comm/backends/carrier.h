// A backend as groups use it: typed collectives, and what the backend can do.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>
#include <vector>

#include "comm/diagnostics/call.h"

namespace tessera::comm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// What a backend can do: one field for each decision that depends on it.
struct Capabilities {
  /// Moves every dtype, and reduces every dtype that has a reduction. A backend
  /// that cannot gets bytes to move and real numbers to reduce, never int16.
  bool takes_every_dtype = false;
  /// AVG is an average. Gloo's is a sum (pytorch issue 162338).
  bool averages = true;
  /// Compares the ranks' calls before data moves, so that nobody else has to.
  bool compares_calls = false;
  /// Opens the profiler's range of a call, on the thread that runs it.
  bool traces_calls = false;
  /// Has allocate_shared() and all_to_all_pieces().
  bool shares_memory = false;
  /// How c10d registers the backend.
  c10d::ProcessGroup::BackendType c10d_type =
      c10d::ProcessGroup::BackendType::CUSTOM;
};

/// The operations of a group, over one backend. Each takes the call that it
/// stands for; `async` is c10d's asyncOp. Tensors are contiguous.
class Carrier {
 public:
  using Tensors = std::vector<at::Tensor>;

  explicit Carrier(const Capabilities& capabilities) : can(capabilities) {}
  virtual ~Carrier() = default;
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

  /// The backend, for c10d.
  virtual BackendPtr backend() = 0;
  /// Ends the operations under way. Peers that share memory learn the reason.
  virtual void give_up(const std::string& reason);

  virtual WorkPtr all_gather(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      bool async) = 0;
  virtual WorkPtr reduce_scatter(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      const c10d::ReduceOp& op,
      bool async) = 0;
  virtual WorkPtr all_reduce(
      const Call& call,
      at::Tensor tensor,
      const c10d::ReduceOp& op,
      bool async) = 0;
  virtual WorkPtr broadcast(
      const Call& call,
      at::Tensor tensor,
      int root,
      bool async) = 0;
  /// Splits are rows of dim 0 for each rank; without any the parts are equal.
  virtual WorkPtr all_to_all(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      std::vector<int64_t> output_splits,
      std::vector<int64_t> input_splits,
      bool async) = 0;
  virtual WorkPtr barrier(const Call& call, bool async) = 0;

  /// `output`: the inputs of all ranks; undefined on ranks other than `root`.
  virtual WorkPtr gather(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      int root,
      bool async) = 0;
  /// `input`: a part for each rank; undefined on ranks other than `root`.
  virtual WorkPtr scatter(
      const Call& call,
      at::Tensor output,
      at::Tensor input,
      int root,
      bool async) = 0;
  /// In place on `root`; the tensors of other ranks stay as they are.
  virtual WorkPtr reduce(
      const Call& call,
      at::Tensor tensor,
      int root,
      const c10d::ReduceOp& op,
      bool async) = 0;

  /// Messages between two ranks, which are compared by both. Tensors of the
  /// CPU; only of the carrier that serves the CPU.
  virtual WorkPtr send(
      const Call& call,
      const at::Tensor& tensor,
      int to,
      int tag,
      bool async);
  virtual WorkPtr recv(
      const Call& call,
      const at::Tensor& tensor,
      int from,
      int tag,
      bool async);

  /// all_to_all() with the part of each rank in pieces; done on return. Only if
  /// the backend shares memory.
  virtual WorkPtr all_to_all_pieces(
      const Call& call,
      const std::vector<Tensors>& outputs,
      const std::vector<Tensors>& inputs);
  /// Memory that all ranks map, zero-filled. Collective. Only if the backend
  /// shares memory.
  virtual at::Tensor allocate_shared(
      at::IntArrayRef sizes,
      at::ScalarType dtype);

  const Capabilities can;
};

using CarrierPtr = std::shared_ptr<Carrier>;

} // namespace tessera::comm
