#include "comm/backends/shm_tensors.h"

#include <tessera/error.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "comm/diagnostics/describe_call.h"
#include "comm/shm/reduce_kernels.h"

namespace tessera::comm {

shm::Reduction reduction_of(
    const at::Tensor& tensor,
    const c10d::ReduceOp& op) {
  const ReduceOp ours = [&] {
    switch (op.op_) {
      case c10d::ReduceOp::SUM:
        return ReduceOp::Sum;
      case c10d::ReduceOp::AVG:
        return ReduceOp::Avg;
      case c10d::ReduceOp::MIN:
        return ReduceOp::Min;
      case c10d::ReduceOp::MAX:
        return ReduceOp::Max;
      default:
        raise<c10::ValueError>(
            {.call = "shm backend"},
            "this reduction is not supported over shared memory; use SUM, AVG, MIN or MAX.");
    }
  }();
  const auto found = shm::find_reduction(tensor.scalar_type(), ours);
  if (!found) {
    raise<c10::ValueError>(
        {.call = "shm backend"},
        fmt::format(
            "{} of {} is not defined. Convert the tensor first.",
            name_of(ours),
            c10::toString(tensor.scalar_type())));
  }
  return *found;
}

namespace {
using Spans = shm::Collectives::Spans;
} // namespace

std::vector<Spans> spans_of(
    const at::Tensor& tensor,
    const std::vector<int64_t>& splits,
    int num_ranks) {
  const auto ranks = static_cast<size_t>(num_ranks);
  const size_t row = tensor.numel() == 0
      ? 0
      : tensor.nbytes() / static_cast<size_t>(tensor.size(0));
  std::vector<Spans> result(ranks);
  std::byte* next = bytes_of(tensor);
  for (size_t rank = 0; rank < ranks; ++rank) {
    const size_t bytes = splits.empty()
        ? tensor.nbytes() / ranks
        : static_cast<size_t>(splits[rank]) * row;
    result[rank].push_back({next, bytes});
    next += bytes;
  }
  return result;
}

std::vector<Spans> spans_of(
    const std::vector<std::vector<at::Tensor>>& pieces) {
  std::vector<Spans> result;
  for (const auto& tensors : pieces) {
    result.emplace_back();
    for (const at::Tensor& tensor : tensors) {
      if (tensor.numel() != 0) {
        result.back().push_back({bytes_of(tensor), tensor.nbytes()});
      }
    }
  }
  return result;
}

void require_contiguous(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) {
    raise<c10::ValueError>(
        {.call = "shm backend"},
        "tensors must be contiguous. Pass tensor.contiguous().");
  }
}

} // namespace tessera::comm
