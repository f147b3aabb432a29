// From the tensors that callers pass to the tensors that backends take.
#pragma once

#include <tessera/comm/reduce_op.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/group/group_impl.h"

namespace tessera::comm {

/// What a step that is being captured may do instead of another exchange.
inline constexpr const char* kOverNcclOnly =
    "In a captured step the ranks can exchange GPU tensors over NCCL only; make other exchanges outside the step.";

/// A tensor on its way to a backend that may not take it as it is.
///
/// wire() is what the backend gets: bytes to move, or a dtype that the backend
/// can reduce, in host memory if the group has no backend for the device.
/// write_back() copies a result back into the tensor. note_write() counts the
/// tensor as written once more, since a collective that is awaited later has
/// written since it was started; on every rank, also where write_back() is not
/// called.
class StagedTensor {
 public:
  enum class Contents { Bytes, Values };

  StagedTensor(
      const GroupImpl& group,
      const at::Tensor& tensor,
      Contents contents);

  const at::Tensor& wire() const {
    return wire_;
  }

  void write_back() const;
  void note_write() const;

 private:
  at::Tensor as_original() const;

  at::Tensor original_;
  at::Tensor wire_;
  bool staged_ = false;
};

/// What to ask a backend for, and what is left to do afterwards.
struct ReducePlan {
  c10d::ReduceOp op;
  double divisor = 1; // of the result
};

/// Throws c10::ValueError if the reduction is not defined, or not supported by
/// the backend.
ReducePlan plan_reduction(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& tensor,
    ReduceOp op);

} // namespace tessera::comm
