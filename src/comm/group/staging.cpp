#include "comm/group/staging.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>

#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "comm/diagnostics/describe_call.h"
#include "comm/raw_access.h"
#include "comm/shm/reduce_kernels.h"
#include "libtorch/recording.h"

namespace tessera::comm {
namespace {

/// The same memory, which it does not own: where a replay finds the values,
/// whatever has become of the tensor.
at::Tensor place_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? tensor
                             : at::from_blob(
                                   tensor.data_ptr(),
                                   tensor.sizes(),
                                   tensor.strides(),
                                   tensor.options());
}

} // namespace

StagedTensor::StagedTensor(
    const GroupImpl& group,
    const at::Tensor& tensor,
    Contents contents)
    : original_(tensor.detach()), wire_(original_) {
  const auto& carrier = group.carrier(tensor.device().type());
  staged_ = tensor.is_cuda() && carrier == group.carrier(at::kCPU);
  if (staged_) {
    libtorch::refuse_in_recording("collective", kOverNcclOnly);
    wire_ = wire_.to(at::kCPU);
  } else if (wire_.is_cpu() && libtorch::is_recorded_here()) {
    wire_ = place_of(wire_);
  }
  if (carrier->can.takes_every_dtype) {
    return;
  }
  if (contents == Contents::Bytes || wire_.scalar_type() == at::kBool) {
    wire_ = wire_.view({-1}).view(at::kByte);
  } else if (wire_.is_complex()) {
    wire_ = at::view_as_real(wire_);
  }
}

void StagedTensor::note_write() const {
  before_raw_write(original_, "wait");
}

void StagedTensor::write_back() const {
  note_write();
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
  const auto& carrier = group.carrier(tensor.device().type());
  // A group of one has no carrier and nothing that a carrier could lack.
  const Capabilities can =
      carrier ? carrier->can : Capabilities{.takes_every_dtype = true};
  const bool lacks_int16 = !can.takes_every_dtype;
  if (!shm::find_reduction(dtype, op) || (lacks_int16 && dtype == at::kShort)) {
    group.raise_error<c10::ValueError>(
        call,
        fmt::format(
            "{} cannot be reduced{}. Convert the tensor, to int32 say.",
            c10::toString(dtype),
            lacks_int16 ? " over " + carrier->backend()->getBackendName()
                        : ""));
  }
  switch (op) {
    case ReduceOp::Sum:
      // As bytes, true + true would be 2.
      return {
          dtype == at::kBool && !can.takes_every_dtype ? c10d::ReduceOp::MAX
                                                       : c10d::ReduceOp::SUM};
    case ReduceOp::Avg:
      return can.averages
          ? ReducePlan{c10d::ReduceOp::AVG}
          : ReducePlan{c10d::ReduceOp::SUM, static_cast<double>(group.size())};
    case ReduceOp::Min:
      return {c10d::ReduceOp::MIN};
    case ReduceOp::Max:
      return {c10d::ReduceOp::MAX};
  }
  TESSERA_INTERNAL_ASSERT(false, "unknown reduction");
}

} // namespace tessera::comm
