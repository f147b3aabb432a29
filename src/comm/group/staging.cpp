#include "comm/group/staging.h"

#include <ATen/ops/view_as_real.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "comm/diagnostics/describe.h"
#include "comm/shm/reduce_kernels.h"

namespace tessera::comm {

StagedTensor::StagedTensor(
    const GroupImpl& group,
    const at::Tensor& tensor,
    Contents contents)
    : original_(tensor.detach()), wire_(original_) {
  const auto& backend = group.backend(tensor.device().type());
  staged_ = tensor.is_cuda() && backend == group.backend(at::kCPU);
  if (staged_) {
    wire_ = wire_.to(at::kCPU);
  }
  // Shared memory and the fake take every dtype.
  const bool takes_all =
      backend->getBackendName() == "shm" || backend->getBackendName() == "fake";
  if (takes_all) {
    return;
  }
  if (contents == Contents::Bytes || wire_.scalar_type() == at::kBool) {
    wire_ = wire_.view({-1}).view(at::kByte);
  } else if (wire_.is_complex()) {
    wire_ = at::view_as_real(wire_);
  }
}

void StagedTensor::write_back() {
  if (staged_) {
    original_.view({-1}).copy_(as_original().view({-1}));
  }
}

at::Tensor StagedTensor::as_original() const {
  if (wire_.scalar_type() == original_.scalar_type()) {
    return wire_;
  }
  return wire_.view({-1}).view(original_.scalar_type());
}

ReducePlan plan_reduction(
    const GroupImpl& group,
    const char* call,
    const at::Tensor& tensor,
    ReduceOp op) {
  const auto dtype = tensor.scalar_type();
  const bool averages = op == ReduceOp::Avg;
  if (averages && !at::isFloatingType(dtype) && !at::isComplexType(dtype)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "an average of {} is not defined. Convert to a floating type, or use ReduceOp::Sum.",
            c10::toString(dtype)));
  }
  if (at::isComplexType(dtype) &&
      (op == ReduceOp::Min || op == ReduceOp::Max)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format("{} of complex numbers is not defined.", name_of(op)));
  }
  const auto& backend = group.backend(tensor.device().type());
  const std::string name = backend ? backend->getBackendName() : "none";
  // Shared memory reduces the most; the others lack int16 of these.
  const bool is_wired = name == "gloo" || name == "nccl";
  if (!shm::find_reduction(dtype, op) || (is_wired && dtype == at::kShort)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "{} cannot be reduced{}. Convert the tensor, to int32 say.",
            c10::toString(dtype),
            is_wired ? " over " + name : ""));
  }
  switch (op) {
    case ReduceOp::Sum:
      // As bytes, true + true would be 2.
      return {
          dtype == at::kBool && name != "shm" ? c10d::ReduceOp::MAX
                                              : c10d::ReduceOp::SUM};
    case ReduceOp::Avg:
      // Gloo's AVG is a sum (pytorch issue 162338).
      return name == "gloo"
          ? ReducePlan{c10d::ReduceOp::SUM, static_cast<double>(group.size())}
          : ReducePlan{c10d::ReduceOp::AVG};
    case ReduceOp::Min:
      return {c10d::ReduceOp::MIN};
    case ReduceOp::Max:
      return {c10d::ReduceOp::MAX};
  }
  TESSERA_INTERNAL_ASSERT(false, "unknown reduction");
}

} // namespace tessera::comm
