// Between what callers pass and what backends take.
#pragma once

#include <tessera/comm/reduce_op.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "comm/group/group_impl.h"

namespace tessera::comm {

/// A tensor on its way to a backend that may not take it as it is.
///
/// wire() is what the backend gets: for data movement the bytes, for
/// reductions a dtype it can add, in host memory where the group has no
/// backend for the device. write_back() puts a result where it belongs.
class StagedTensor {
 public:
  enum class Contents { Bytes, Values };

  StagedTensor(
      const GroupImpl& group,
      const at::Tensor& tensor,
      Contents contents);

  at::Tensor& wire() {
    return wire_;
  }

  void write_back();

 private:
  at::Tensor as_original() const;

  at::Tensor original_;
  at::Tensor wire_;
  bool staged_ = false;
};

/// How a backend is asked for a reduction, and what is left to do afterwards.
struct ReducePlan {
  c10d::ReduceOp op;
  double divisor = 1; // of the result; 1: nothing to do
};

/// Throws c10::ValueError for what is not defined, or not by the backend.
ReducePlan plan_reduction(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& tensor,
    ReduceOp op);

} // namespace tessera::comm
